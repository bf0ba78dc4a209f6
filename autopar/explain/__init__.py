"""Questions about a plan: why, why not, what if, against recipes; and the report page."""
