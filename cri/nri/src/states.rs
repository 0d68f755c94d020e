//! What plugins were told of each pod and container, so that each stop and each removal is told once,
//! whoever causes it: a call, an exit, or the removal of the pod.

use std::collections::HashMap;

/// How far the story has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// It is there: its stop and its removal are still to be told.
    Alive,
    /// Its removal is still to be told.
    Stopped,
}

/// All stories. Empty while there is no plugin.
#[derive(Debug, Default)]
pub(crate) struct States {
    told: HashMap<String, Told>,
}

// === impl States ===

impl States {
    pub(crate) fn set(&mut self, id: &str, told: Told) {
        self.told.insert(id.to_owned(), told);
    }

    /// Whether its stop is still to be told; it is, after this.
    pub(crate) fn stop(&mut self, id: &str) -> bool {
        match self.told.get_mut(id) {
            Some(told @ Told::Alive) => {
                *told = Told::Stopped;
                true
            }
            Some(Told::Stopped) | None => false,
        }
    }

    /// Whether its removal is still to be told; it is, after this.
    pub(crate) fn remove(&mut self, id: &str) -> bool {
        self.told.remove(id).is_some()
    }

    pub(crate) fn clear(&mut self) {
        self.told = HashMap::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_and_a_removal_are_told_once() {
        let mut states = States::default();
        assert!(!states.stop("a") && !states.remove("a"));
        states.set("a", Told::Alive);
        assert!(states.stop("a") && !states.stop("a"));
        assert!(states.remove("a") && !states.remove("a"));
    }
}
