"""Run other packages on gdn. A module here imports the other package only when its function is called."""
