//! Fault points: named places at which a test aborts the process, to check that the next process recovers.
//!
//! In the runtime, the network plugins, the service proxy, the network policies, and the agent's records and addresses,
//! a point follows every step that changes the kernel or the disk; in the store, every step of its migration. Outside of
//! tests a point costs one pointer comparison.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The environment variable that arms one point, by its name. `NAME:3` aborts at the third pass.
pub const VARIABLE: &str = "CORACLE_FAULT";

/// The armed point, and the number of passes until the abort.
struct Armed {
    name: String,
    times: AtomicU32,
}

/// Aborts the process, like a crash, if this point is armed and due.
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
    fn a_point_is_due_at_the_given_pass() {
        let due = |text: &str, passed: &[&str]| {
            let armed = Armed::parse(text);
            passed.iter().position(|name| armed.is_due(name))
        };
        assert_eq!(due("a", &["b", "a", "a"]), Some(1));
        assert_eq!(due("a:3", &["a", "b", "a", "a", "a"]), Some(3));
        assert_eq!(due("a:2", &["a"]), None);
    }
}
