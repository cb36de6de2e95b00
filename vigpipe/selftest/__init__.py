"""What does this machine do, and does it do it right? One command, within a budget of time."""
