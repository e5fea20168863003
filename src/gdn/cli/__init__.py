"""The command line: `app` has the commands, `warmup` one of them, `console` and `options` what they share."""
