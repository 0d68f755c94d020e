//! API clients that try to exhaust memory, descriptors, time or the log.
