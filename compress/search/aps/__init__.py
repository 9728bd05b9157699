"""Channel numbers by a controller over shared meta weights; aps_search.py has the search, the other files its parts."""
