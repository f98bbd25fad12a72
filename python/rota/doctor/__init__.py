"""`python -m rota doctor`: whether rota works here."""
