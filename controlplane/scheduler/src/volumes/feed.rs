//! The watches of claims, volumes, classes and drivers.

use std::collections::HashSet;
use std::hash::Hash;

use coracle_values::object::{Key, ObjectExt};
use coracle_watch::{Config, Event};
use futures::StreamExt;
use futures::stream::BoxStream;
use kube::Client;

use super::object::{Attachment, Capacity, Claim, CsiDriver, CsiNode, Reduce, StorageClass, Volume};
use super::{State, VolumeChanges, Volumes};
use crate::object::is_older;
use crate::watch::stream;

/// A kind of objects in the state, as an index of `State::listed`.
#[derive(Clone, Copy)]
enum Kind {
    Claim,
    Volume,
    Class,
    Driver,
    CsiNode,
    Capacity,
    Attachment,
}

/// The effect of an event on the objects of one kind.
struct Applied {
    /// Whether an object changed.
    is_change: bool,
    /// Whether the first list is complete.
    is_listed: bool,
}

/// Keeps the state up to date. It never returns.
pub(crate) async fn run(client: Client, volumes: Volumes) {
    tokio::join!(
        feed(stream::<Claim>(&client, Config::control_plane()), &volumes, claim),
        feed(stream::<Volume>(&client, Config::control_plane()), &volumes, volume),
        feed(stream::<StorageClass>(&client, Config::control_plane()), &volumes, class),
        feed(stream::<CsiDriver>(&client, Config::control_plane()), &volumes, driver),
        feed(stream::<CsiNode>(&client, Config::control_plane()), &volumes, csi_node),
        feed(stream::<Capacity>(&client, Config::control_plane()), &volumes, capacity),
        feed(stream::<Attachment>(&client, Config::control_plane()), &volumes, attachment),
    );
}

/// Applies the events of one kind. `apply` returns whether the change may help any pod with claims.
async fn feed<K, I>(
    mut events: BoxStream<'static, Event<K>>,
    volumes: &Volumes,
    apply: impl Fn(&mut State, &mut HashSet<I>, Event<K>) -> bool,
) {
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        let helps = {
            let mut state = volumes.lock();
            let changed = apply(&mut state, &mut listed, event);
            state.pending.supply |= changed;
            state.pending != VolumeChanges::default()
        };
        if helps {
            volumes.shared.changes.send_modify(|count| *count += 1);
        }
    }
}

/// Applies a change of a claim. The change can help only the pods that use the claim.
pub(super) fn claim(state: &mut State, listed: &mut HashSet<Key>, event: Event<Claim>) -> bool {
    // Ignores an event that is older than the claim that the scheduler has written.
    if let Event::Apply(claim) = &event
        && state.claims.get(&claim.key()).is_some_and(|known| is_older(claim, known))
    {
        return false;
    }
    let key = match &event {
        Event::Apply(claim) | Event::InitApply(claim) | Event::Delete(claim) => Some(claim.key()),
        Event::Init | Event::InitDone => None,
    };
    let Applied { is_change, is_listed } = apply(&mut state.claims, listed, event, ObjectExt::key);
    state.pending.claims.extend(key.filter(|_| is_change));
    state.listed[Kind::Claim as usize] |= is_listed;
    is_listed
}

fn volume(state: &mut State, listed: &mut HashSet<String>, event: Event<Volume>) -> bool {
    if let Event::Apply(volume) | Event::InitApply(volume) = &event
        && volume.spec.claim_ref.is_some()
    {
        // The stored volume contains the binding now, so the reservation is not needed any more.
        state.reserved.remove(volume.name());
    }
    let applied = apply(&mut state.volumes, listed, event, |volume| volume.name().to_owned());
    state.record(Kind::Volume, applied)
}

fn class(state: &mut State, listed: &mut HashSet<String>, event: Event<StorageClass>) -> bool {
    let applied = apply(&mut state.classes, listed, event, |class| class.name().to_owned());
    state.record(Kind::Class, applied)
}

fn driver(state: &mut State, listed: &mut HashSet<String>, event: Event<CsiDriver>) -> bool {
    let applied = apply(&mut state.drivers, listed, event, |driver| driver.name().to_owned());
    state.record(Kind::Driver, applied)
}

fn csi_node(state: &mut State, listed: &mut HashSet<String>, event: Event<CsiNode>) -> bool {
    let applied = apply(&mut state.csi_nodes, listed, event, |node| node.name().to_owned());
    state.record(Kind::CsiNode, applied)
}

fn capacity(state: &mut State, listed: &mut HashSet<Key>, event: Event<Capacity>) -> bool {
    let applied = apply(&mut state.capacities, listed, event, ObjectExt::key);
    state.record(Kind::Capacity, applied)
}

fn attachment(state: &mut State, listed: &mut HashSet<String>, event: Event<Attachment>) -> bool {
    let applied = apply(&mut state.attachments, listed, event, |one| one.name().to_owned());
    state.record(Kind::Attachment, applied)
}

// === impl State ===

impl State {
    /// Records whether a kind is listed. Returns whether the event may help any pod with claims.
    fn record(&mut self, kind: Kind, applied: Applied) -> bool {
        self.listed[kind as usize] |= applied.is_listed;
        applied.is_change || applied.is_listed
    }
}

/// A map of objects by key.
trait Objects<I, K> {
    fn put(&mut self, key: I, object: K) -> Option<K>;
    fn take(&mut self, key: &I) -> Option<K>;
    fn keep(&mut self, listed: &HashSet<I>);
    fn get(&self, key: &I) -> Option<&K>;
}

impl<I: Eq + Hash, K> Objects<I, K> for std::collections::HashMap<I, K> {
    fn put(&mut self, key: I, object: K) -> Option<K> {
        self.insert(key, object)
    }
    fn take(&mut self, key: &I) -> Option<K> {
        self.remove(key)
    }
    fn keep(&mut self, listed: &HashSet<I>) {
        self.retain(|key, _| listed.contains(key));
    }
    fn get(&self, key: &I) -> Option<&K> {
        self.get(key)
    }
}

impl<I: Ord + Eq + Hash, K> Objects<I, K> for std::collections::BTreeMap<I, K> {
    fn put(&mut self, key: I, object: K) -> Option<K> {
        self.insert(key, object)
    }
    fn take(&mut self, key: &I) -> Option<K> {
        self.remove(key)
    }
    fn keep(&mut self, listed: &HashSet<I>) {
        self.retain(|key, _| listed.contains(key));
    }
    fn get(&self, key: &I) -> Option<&K> {
        self.get(key)
    }
}

/// Applies one event.
fn apply<I: Eq + Hash + Clone, K: Reduce>(
    objects: &mut impl Objects<I, K>,
    listed: &mut HashSet<I>,
    event: Event<K>,
    key: impl Fn(&K) -> I,
) -> Applied {
    let put = |objects: &mut _, mut object: K| {
        object.reduce();
        let key = key(&object);
        let same = Objects::get(objects, &key) == Some(&object);
        Objects::put(objects, key, object);
        !same
    };
    let is_listed = matches!(event, Event::InitDone);
    let is_change = match event {
        Event::Init => {
            listed.clear();
            false
        }
        Event::InitApply(object) => {
            listed.insert(key(&object));
            put(objects, object)
        }
        Event::Apply(object) => put(objects, object),
        Event::Delete(object) => objects.take(&key(&object)).is_some(),
        Event::InitDone => {
            objects.keep(listed);
            listed.clear();
            false
        }
    };
    Applied { is_change, is_listed }
}
