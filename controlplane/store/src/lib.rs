//! Versioned keyed bytes with compare-and-swap and watch; knows no kind.
