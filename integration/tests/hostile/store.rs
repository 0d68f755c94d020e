//! A full or read-only disk below the store.
