"""The contract between gateway and manager over NATS: `remote` is the gateway's end, `desk` the manager's."""
