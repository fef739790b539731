"""`make bench-influence`: how well influence predicts retraining, beside other libraries; costs; growth."""
