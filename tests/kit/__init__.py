"""Support modules of the tests; no test is here."""
