"""`make bench-influence`: how well influence predicts retraining, beside other libraries; what it costs; how it grows."""
