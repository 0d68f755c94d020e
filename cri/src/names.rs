//! Which sandbox or container has which name: each belongs to one at a time.
//!
//! ```text
//! (free) ──claim──► under way ──keep, told──► taken ──release──► (free)
//!                       └──dropped: it failed, or was undone──► (free)
//! ```
//! Who wants a name of a creation that is under way waits for its end. A client whose call was late, or that went away,
//! comes again with the same name, and cannot see that what it began is being undone.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::error::Error;
use crate::lock::locked;

/// All names. Clones are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    holders: Arc<Mutex<HashMap<String, Holder>>>,
}

#[derive(Debug)]
struct Holder {
    id: String,
    /// Closes when the creation ends, in whatever way.
    under_way: Option<watch::Receiver<()>>,
}

/// A name for as long as what has it is made, or undone.
#[must_use]
pub(crate) struct Claim {
    names: Names,
    name: String,
    id: String,
    kept: bool,
    /// Wakes who waits, when it goes.
    _end: watch::Sender<()>,
}

// === impl Names ===

impl Names {
    /// Takes a name for a new object's id, once no other creation with that name is under way. Takes nothing when it is
    /// dropped meanwhile.
    ///
    /// # Errors
    /// Another object has it.
    pub(crate) async fn claim(&self, name: String, id: String) -> Result<Claim, Error> {
        loop {
            let mut under_way = {
                let mut holders = locked(&self.holders);
                let Some(holder) = holders.get(&name) else {
                    let (end, under_way) = watch::channel(());
                    holders.insert(name.clone(), Holder { id: id.clone(), under_way: Some(under_way) });
                    drop(holders);
                    return Ok(Claim { names: self.clone(), name, id, kept: false, _end: end });
                };
                let under_way = holder.under_way.clone().filter(|creation| creation.has_changed().is_ok());
                under_way.ok_or_else(|| Error::NameTaken { name: name.clone(), id: holder.id.clone() })?
            };
            // Nothing is ever sent: it closes.
            while under_way.changed().await.is_ok() {}
        }
    }

    /// An object that was found again, or that could not be undone, has its name.
    pub(crate) fn hold(&self, name: String, id: String) {
        locked(&self.holders).insert(name, Holder { id, under_way: None });
    }

    /// The name of an object that is removed is free.
    pub(crate) fn release(&self, name: &str, id: &str) {
        let mut holders = locked(&self.holders);
        if holders.get(name).is_some_and(|holder| holder.id == id) {
            holders.remove(name);
        }
    }
}

// === impl Claim ===

impl Claim {
    /// The id of what has the name.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The object is made, and has its name until that is released. Who waits learns it when the claim goes.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut holders = locked(&self.names.holders);
        let ours = |holder: &Holder| holder.id == self.id && holder.under_way.is_some();
        if !self.kept && holders.get(&self.name).is_some_and(ours) {
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

    /// Who has the name; it is free when nobody.
    fn taken_by(names: &Names) -> Option<String> {
        match claim(names, "probe").now_or_never().expect("nothing is under way") {
            Ok(_claim) => None,
            Err(Error::NameTaken { id, .. }) => Some(id),
            Err(other) => panic!("{other}"),
        }
    }

    #[tokio::test]
    async fn a_name_of_what_is_undone_is_waited_for() {
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
    async fn a_name_of_what_is_made_is_refused_also_to_who_waited() {
        let names = Names::default();
        let mut first = claim(&names, "first").await.expect("free");
        let mut second = Box::pin(claim(&names, "second"));
        first.keep();
        assert!((&mut second).now_or_never().is_none(), "its caller may have gone, and it be undone");
        drop(first);
        assert!(second.await.is_err());
        assert_eq!(taken_by(&names), Some("first".into()));
        names.release("name", "other");
        assert_eq!(taken_by(&names), Some("first".into()));
        names.release("name", "first");
        assert_eq!(taken_by(&names), None);
    }

    #[tokio::test]
    async fn what_could_not_be_undone_keeps_its_name() {
        let names = Names::default();
        let first = claim(&names, "first").await.expect("free");
        names.hold("name".into(), "first".into());
        drop(first);
        assert_eq!(taken_by(&names), Some("first".into()));
    }

    #[tokio::test]
    async fn who_ends_late_leaves_the_name_to_who_has_it_now() {
        let names = Names::default();
        let first = claim(&names, "first").await.expect("free");
        names.release("name", "first");
        names.hold("name".into(), "second".into());
        drop(first);
        assert_eq!(taken_by(&names), Some("second".into()));
    }
}
