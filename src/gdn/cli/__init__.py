"""The command line: `app` has the commands, `console` the options and outputs that they share."""
