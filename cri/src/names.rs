//! Names of sandboxes and containers: a name belongs to one object at a time.
//!
//! ```text
//! (free) ──claim──► in progress ──keep, delivered──► taken ──release──► (free)
//!                       └──dropped: failed or undone──► (free)
//! ```
//! A claim waits while a creation with the same name is in progress. A client whose call timed out or was cancelled
//! retries with the same name, while its first creation is being undone.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::error::Error;
use crate::lock::locked;

/// All names. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    holders: Arc<Mutex<HashMap<String, Holder>>>,
}

#[derive(Debug)]
struct Holder {
    id: String,
    /// Closes when the creation ends. `None` after the end of the creation.
    in_progress: Option<watch::Receiver<()>>,
}

/// A claimed name, until the object is created or undone.
#[must_use]
pub(crate) struct Claim {
    names: Names,
    name: String,
    id: String,
    kept: bool,
    /// Wakes the waiting claims when it is dropped.
    _end: watch::Sender<()>,
}

// === impl Names ===

impl Names {
    /// Claims a name for a new object's id. Waits while a creation with this name is in progress. Cancel safe.
    ///
    /// # Errors
    /// If another object has the name.
    pub(crate) async fn claim(&self, name: String, id: String) -> Result<Claim, Error> {
        loop {
            let mut in_progress = {
                let mut holders = locked(&self.holders);
                let Some(holder) = holders.get(&name) else {
                    let (end, in_progress) = watch::channel(());
                    holders.insert(name.clone(), Holder { id: id.clone(), in_progress: Some(in_progress) });
                    drop(holders);
                    return Ok(Claim { names: self.clone(), name, id, kept: false, _end: end });
                };
                let in_progress =
                    holder.in_progress.clone().filter(|creation| creation.has_changed().is_ok());
                in_progress.ok_or_else(|| Error::NameTaken { name: name.clone(), id: holder.id.clone() })?
            };
            // Nothing is ever sent. The wait ends when the channel closes.
            while in_progress.changed().await.is_ok() {}
        }
    }

    /// Sets the holder of a name, for a recovered object, or for an object whose undo failed.
    pub(crate) fn hold(&self, name: String, id: String) {
        locked(&self.holders).insert(name, Holder { id, in_progress: None });
    }

    /// Releases the name of a removed object.
    pub(crate) fn release(&self, name: &str, id: &str) {
        let mut holders = locked(&self.holders);
        if holders.get(name).is_some_and(|holder| holder.id == id) {
            holders.remove(name);
        }
    }
}

// === impl Claim ===

impl Claim {
    /// The id of the object with this name.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Keeps the name after the claim's drop: the object is created. Claims that wait for the name fail at the drop.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut holders = locked(&self.names.holders);
        let ours = |holder: &&mut Holder| holder.id == self.id && holder.in_progress.is_some();
        let Some(holder) = holders.get_mut(&self.name).filter(ours) else { return };
        if self.kept {
            // Otherwise each object would keep the memory of a channel.
            holder.in_progress = None;
        } else {
            holders.remove(&self.name);
        }
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("name", &self.name).field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn claim(names: &Names, id: &str) -> impl Future<Output = Result<Claim, Error>> + use<> {
        let (names, id) = (names.clone(), id.to_owned());
        async move { names.claim("name".into(), id).await }
    }

    /// The holder of the name. `None` if the name is free.
    fn taken_by(names: &Names) -> Option<String> {
        match claim(names, "probe").now_or_never().expect("no call is in progress") {
            Ok(_claim) => None,
            Err(Error::NameTaken { id, .. }) => Some(id),
            Err(other) => panic!("{other}"),
        }
    }

    #[tokio::test]
    async fn a_claim_waits_until_an_object_is_undone() {
        let names = Names::default();
        let first = claim(&names, "first").await.expect("free");
        let mut second = Box::pin(claim(&names, "second"));
        let mut gone = Box::pin(claim(&names, "gone"));
        assert!((&mut second).now_or_never().is_none() && (&mut gone).now_or_never().is_none());
        drop((gone, first));
        let second = second.await.expect("free again");
        assert_eq!(second.id(), "second");
        drop(second);
        assert_eq!(taken_by(&names), None);
    }

    #[tokio::test]
    async fn a_claim_is_refused_after_waiting_for_a_creation() {
        let names = Names::default();
        let mut first = claim(&names, "first").await.expect("free");
        let mut second = Box::pin(claim(&names, "second"));
        first.keep();
        assert!((&mut second).now_or_never().is_none(), "the first object can still be undone");
        drop(first);
        assert!(second.await.is_err());
        assert_eq!(taken_by(&names), Some("first".into()));
        let has_ended = |holder: &Holder| holder.in_progress.is_none();
        assert!(locked(&names.holders).values().all(has_ended), "a kept name needs no channel");
        names.release("name", "other");
        assert_eq!(taken_by(&names), Some("first".into()));
        names.release("name", "first");
        assert_eq!(taken_by(&names), None);
    }

    #[tokio::test]
    async fn an_object_that_could_not_be_undone_keeps_its_name() {
        let names = Names::default();
        let first = claim(&names, "first").await.expect("free");
        names.hold("name".into(), "first".into());
        drop(first);
        assert_eq!(taken_by(&names), Some("first".into()));
    }

    #[tokio::test]
    async fn a_late_drop_does_not_release_a_new_holders_name() {
        let names = Names::default();
        let first = claim(&names, "first").await.expect("free");
        names.release("name", "first");
        names.hold("name".into(), "second".into());
        drop(first);
        assert_eq!(taken_by(&names), Some("second".into()));
    }
}
