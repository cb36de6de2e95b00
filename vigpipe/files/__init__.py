"""Write files whole, and read files that anybody may have written."""
