"""All use of private torch: one module a concern, every name in the ledger, every capability available or missing."""
