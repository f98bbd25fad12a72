"""How processes meet over a torch Store: polls, claims, documents, and steps taken together."""
