"""Results that are differentiated again (``create_graph=True``)."""
