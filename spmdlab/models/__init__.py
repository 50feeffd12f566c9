"""Models.  They name the dims of their arrays by logical axis, and know no mesh."""
