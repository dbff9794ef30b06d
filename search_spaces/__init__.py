"""What may be tried, and what physics says it costs. Knows no torch, Ray, Optuna or MLflow."""
