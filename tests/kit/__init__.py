"""Support modules of the tests: no test lives here."""
