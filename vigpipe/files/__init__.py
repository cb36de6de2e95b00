"""Write files atomically, and read files that anybody may have written."""
