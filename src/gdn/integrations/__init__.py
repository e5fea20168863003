"""Other people's software on gdn. Nothing here is imported by it until its function is called."""
