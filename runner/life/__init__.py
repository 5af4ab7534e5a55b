"""How ranks are started, meet, are watched over, fail together and end."""
