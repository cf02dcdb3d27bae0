"""Device code in the CUTLASS Python DSL, one file a kernel. Importing any of these modules imports the DSL."""
