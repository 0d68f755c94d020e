//! The API's kinds as data: schemas, defaults, validation, patches, wire decoding and tables. Pure: no I/O.
