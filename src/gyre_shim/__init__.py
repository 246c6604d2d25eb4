"""The shim: one small process per execution that outlives the driver."""
