//! Named points at which a test ends the process, to see what the next one makes of what is left.
//!
//! A point stands behind every step of the runtime, and of the network's plugins, that leaves something in the kernel
//! or on the disk. Unarmed, which is always outside of such a test, it costs the look at one pointer.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The environment variable that arms one point, by its name. `NAME:3` is the third time that it is passed.
pub const VARIABLE: &str = "CORACLE_FAULT";

/// The point that is armed, and how often it is still passed, this time included.
struct Armed {
    name: String,
    times: AtomicU32,
}

/// Ends the process here, as abruptly as a crash does, when this point is the armed one.
#[inline]
pub fn point(name: &str) {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    let armed = ARMED.get_or_init(|| std::env::var(VARIABLE).ok().map(|text| Armed::parse(&text)));
    if armed.as_ref().is_some_and(|armed| armed.is_due(name)) {
        std::process::abort();
    }
}

// === impl Armed ===

impl Armed {
    fn parse(text: &str) -> Self {
        let counted = text.split_once(':').and_then(|(name, times)| Some((name, times.parse().ok()?)));
        let (name, times) = counted.unwrap_or((text, 1));
        Self { name: name.to_owned(), times: AtomicU32::new(times) }
    }

    fn is_due(&self, name: &str) -> bool {
        self.name == name && self.times.fetch_sub(1, Ordering::Relaxed) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_due_when_it_is_passed_for_that_time() {
        let due = |text: &str, passed: &[&str]| {
            let armed = Armed::parse(text);
            passed.iter().position(|name| armed.is_due(name))
        };
        assert_eq!(due("a", &["b", "a", "a"]), Some(1));
        assert_eq!(due("a:3", &["a", "b", "a", "a", "a"]), Some(3));
        assert_eq!(due("a:2", &["a"]), None);
    }
}
