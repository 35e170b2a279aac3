"""Names of DeepSpeed's launcher; programs are started by torchrun or python."""
