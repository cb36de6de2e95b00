"""The commands `vigpipe bench NAME`: ratios that are measured side by side in one run."""
