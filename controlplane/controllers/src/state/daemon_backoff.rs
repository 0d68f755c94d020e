//! Back-off between failed pods of a daemon set on one node, or of a stateful set with one name.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::object::Key;

/// Back-off after the first failed pod. It doubles with each further failure, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(15 * 60);

/// Failures by daemon set and node, or by stateful set and name of the pod. In the methods, `node` stands for both.
#[derive(Debug, Default)]
pub(crate) struct PodBackoff(HashMap<Key, HashMap<String, Entry>>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    wait: Duration,
    since: Timestamp,
}

impl PodBackoff {
    /// The rest of the back-off. `None` if a failed pod of the node may be deleted now. A failure in the future is
    /// ignored: the clock was set back.
    pub(crate) fn remaining(&self, set: &Key, node: &str, now: Timestamp) -> Option<Duration> {
        let entry = self.0.get(set)?.get(node).filter(|entry| entry.since <= now)?;
        crate::queue::until(entry.since.checked_add(entry.wait).ok()?, now)
    }

    /// Records that a failed pod of the node is deleted. The back-off doubles. After a long time without failures the
    /// back-off is reset.
    pub(crate) fn failed(&mut self, set: &Key, node: &str, now: Timestamp) {
        let nodes = self.0.entry(set.clone()).or_default();
        let wait = match nodes.get(node) {
            Some(entry) if now.duration_since(entry.since).unsigned_abs() < MAX_BACKOFF * 2 => {
                (entry.wait * 2).min(MAX_BACKOFF)
            }
            Some(_) | None => FIRST_BACKOFF,
        };
        nodes.insert(node.to_owned(), Entry { wait, since: now });
    }

    /// Keeps only the entries of a stateful set for pods that are needed.
    pub(crate) fn retain(&mut self, set: &Key, is_needed: impl Fn(&str) -> bool) {
        let Some(pods) = self.0.get_mut(set) else { return };
        pods.retain(|name, _| is_needed(name));
        if pods.is_empty() {
            self.0.remove(set);
        }
    }

    /// Removes the entries of a deleted set.
    pub(crate) fn forget(&mut self, set: &Key) {
        self.0.remove(set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_and_is_reset_after_a_long_time() {
        let (mut backoff, key) = (PodBackoff::default(), Key::new("n", "d"));
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(backoff.remaining(&key, "a", at(0)), None);
        backoff.failed(&key, "a", at(0));
        assert!(backoff.remaining(&key, "a", at(0)).is_some());
        assert_eq!(backoff.remaining(&key, "a", at(1)), None);
        backoff.failed(&key, "a", at(1));
        assert!(backoff.remaining(&key, "a", at(2)).is_some());
        backoff.failed(&key, "a", at(10_000));
        assert_eq!(backoff.remaining(&key, "a", at(10_001)), None);
        assert_eq!(backoff.remaining(&key, "a", at(5)), None, "the clock was set back");
        backoff.failed(&key, "b", at(10_001));
        backoff.retain(&key, |name| name == "b");
        assert_eq!(backoff.0[&key].len(), 1);
        backoff.forget(&key);
        assert!(backoff.0.is_empty());
    }
}
