"""Methods that turn weights into quantised weights; one method, one file."""
