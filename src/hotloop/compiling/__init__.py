"""Compile in place: `apply` puts presets on, `observe` sees what torch does, `fallback` steps down, `control` joins."""
