"""The vocabulary that every part of Espalier shares. The core needs numpy and msgpack only."""
