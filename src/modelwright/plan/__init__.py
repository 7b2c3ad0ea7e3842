"""The plan: recipe and hardware facts become numbers, by arithmetic alone."""
