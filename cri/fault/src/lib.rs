//! Named points at which a test ends the process, to see what the next one makes of what is left.
//!
//! A point stands behind every step of the runtime that leaves something in the kernel or on the disk.
//! Unarmed, which is always outside of such a test, it costs the look at one pointer.

use std::sync::OnceLock;

/// The environment variable that arms one point, by its name.
pub const VARIABLE: &str = "CORACLE_FAULT";

/// Ends the process here, as abruptly as a crash does, when this point is the armed one.
#[inline]
pub fn point(name: &str) {
    static ARMED: OnceLock<Option<String>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| std::env::var(VARIABLE).ok());
    if armed.as_deref() == Some(name) {
        std::process::abort();
    }
}
