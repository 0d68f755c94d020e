//! Updates the graph and applies the plans.
//!
//! Kinds that other controllers watch come from their caches. The collector watches the metadata of all other kinds.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_watch::{Config, Event};
use futures::future::join_all;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::discovery::verbs;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use super::absent_owners::AbsentOwners;
use super::actions::{apply, drop_finalizer};
use super::discovery::{discover, until_due};
use super::first_lists::FirstLists;
use super::graph::{FollowUp, Graph, Item};
use super::plan::{Action, ORPHAN, ObservedObject, Owner, foreign_owner, plan};
use super::removed::{MAX_REMOVED, Removed};
use crate::api_kind::ApiKind;
use crate::cache::Cache;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Meta, Object};
use crate::queue::{Next, Queue, pause_after};
use crate::state::deletions::Deletions;

const COMPONENT: &str = "garbage-collector-controller";

/// The garbage collector: the graph and the queues. The name of each key in a queue is the uid of the object
/// ([`Graph::queue_key`]).
pub(crate) struct Collector {
    graph: Mutex<Graph>,
    /// Objects that may have to be deleted, or whose finalizer may have to be removed.
    attempts: Queue<Key>,
    /// Objects whose dependents must be orphaned.
    orphans: Queue<Key>,
    /// The served kinds, to look up owners that are not in the graph.
    kinds: Mutex<Vec<Arc<ApiKind>>>,
    removed: Mutex<Removed>,
    absent_owners: Mutex<AbsentOwners>,
    /// The listener for the deletions that the watches report.
    deletions: Arc<Deletions>,
    /// Notification that the served kinds may have changed.
    kinds_changed: Notify,
    /// Whether the graph has the objects of all kinds of the core group. Their first list fails while the API server
    /// cannot decrypt them.
    has_core: AtomicBool,
}

/// Number of workers that attempt deletions. One namespace cannot occupy all of them ([`Queue::shared`]).
const WORKERS: usize = 4;
/// Number of workers that orphan dependents. An object can have very many dependents, so one namespace cannot occupy
/// both workers.
const ORPHAN_WORKERS: usize = 2;
/// Maximum concurrent look-ups of the owners of one object.
const MAX_LOOKUPS: usize = 8;

/// Runs the collector forever.
pub(crate) async fn run(context: Arc<Context>) {
    let found = discover(&context, &[]).await;
    let mut is_complete = found.is_complete;
    let collector = Arc::new(Collector {
        graph: Mutex::new(Graph::default()),
        attempts: Queue::shared(context.config.queue_metrics.of("garbage"), WORKERS),
        orphans: Queue::shared(context.config.queue_metrics.of("garbage-orphan"), ORPHAN_WORKERS),
        kinds: Mutex::new(found.kinds),
        removed: Mutex::default(),
        absent_owners: Mutex::default(),
        deletions: context.deletions.clone(),
        kinds_changed: Notify::new(),
        has_core: AtomicBool::new(false),
    });
    let shared_kinds = collector.register_handlers(&context);
    let mut watches = Watches::default();
    let mut listed = watches.update(&context, &collector, &shared_kinds);
    context.caches.synced().await;
    listed.wait().await;
    let mut tasks = JoinSet::new();
    for _ in 0..WORKERS {
        let (own, context) = (collector.clone(), context.clone());
        tasks.spawn(async move {
            own.attempts.work("garbage", |key| own.attempt(&context, key.name)).await;
        });
    }
    let (own, of_orphans) = (collector.clone(), context.clone());
    tasks.spawn(async move {
        own.complete(listed).await;
        own.orphan_all(&of_orphans).await;
    });
    loop {
        until_due(&collector.kinds_changed, is_complete).await;
        let found = discover(&context, &collector.kinds()).await;
        is_complete = found.is_complete;
        collector.set_kinds(found.kinds);
        watches.update(&context, &collector, &shared_kinds).detach();
    }
}

/// The running watches of kinds without a shared cache.
#[derive(Default)]
struct Watches {
    running: Vec<(Arc<ApiKind>, AbortOnDropHandle<()>)>,
}

impl Watches {
    /// Starts watches of new kinds, and ends the watches of kinds that are not served any more. Returns the first lists
    /// of the new watches.
    fn update(
        &mut self,
        context: &Arc<Context>,
        collector: &Arc<Collector>,
        shared_kinds: &HashSet<String>,
    ) -> FirstLists {
        let kinds = collector.kinds();
        for (kind, _) in self.running.extract_if(.., |(kind, _)| !kinds.contains(kind)) {
            collector.remove_unserved(&kind);
        }
        let mut listed = FirstLists::default();
        for kind in kinds.iter().filter(|kind| kind.can(&[verbs::DELETE, verbs::LIST, verbs::WATCH])) {
            if shared_kinds.contains(&kind.name()) || self.running.iter().any(|(known, _)| known == kind) {
                continue;
            }
            let (done, first) = tokio::sync::oneshot::channel();
            let task = tokio::spawn(watch(context.clone(), collector.clone(), kind.clone(), done));
            self.running.push((kind.clone(), AbortOnDropHandle::new(task)));
            listed.add(kind, first);
        }
        listed
    }
}

/// Watches the metadata of one kind, for the graph.
async fn watch(
    context: Arc<Context>,
    collector: Arc<Collector>,
    kind: Arc<ApiKind>,
    first: tokio::sync::oneshot::Sender<()>,
) {
    let mut first = Some(first);
    let api: Api<Meta> = Api::all_with(context.client.clone(), &kind.resource);
    let mut events = coracle_watch::watch(api, Config::control_plane());
    let mut seen = HashSet::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                if matches!(event, Event::InitDone) {
                    drop(first.take());
                }
                let is_change = matches!(event, Event::Apply(_) | Event::Delete(_) | Event::InitDone);
                collector.apply_event(&kind, event, &mut seen);
                if is_change && kind.defines_kinds() {
                    collector.kinds_changed.notify_one();
                }
            }
            Err(error) => {
                tracing::debug!(kind = %kind.name(), %error, "cannot watch a kind");
                // The kind may not be served any more: discover the kinds again.
                collector.kinds_changed.notify_one();
            }
        }
    }
}

// === impl Collector ===

impl Collector {
    fn lock(&self) -> MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the graph has the objects of all kinds of the core group. Until then no object is orphaned, and no
    /// foreground deletion ends: both would miss the dependents that the API server cannot read. These dependents would
    /// be deleted later.
    async fn complete(&self, listed: FirstLists) {
        listed.wait_for_core().await;
        self.has_core.store(true, Ordering::Release);
        let waiting = self.lock().foreground();
        self.enqueue(FollowUp { attempt: waiting, orphan: Vec::new() });
    }

    /// Queues objects. Objects that do not exist any more need no work.
    fn enqueue(&self, work: FollowUp) {
        for (queue, uids) in [(&self.attempts, work.attempt), (&self.orphans, work.orphan)] {
            if !uids.is_empty() {
                let graph = self.lock();
                let keys: Vec<Key> = uids.iter().filter_map(|uid| graph.queue_key(uid)).collect();
                drop(graph);
                keys.into_iter().for_each(|key| queue.add(key));
            }
        }
    }

    fn kinds(&self) -> Vec<Arc<ApiKind>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the served kinds. A kind that did not change stays the same object, because the graph refers to it.
    fn set_kinds(&self, found: Vec<Arc<ApiKind>>) {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = |new: Arc<ApiKind>| kinds.iter().find(|known| **known == new).cloned().unwrap_or(new);
        let found = found.into_iter().map(kept).collect();
        *kinds = found;
        drop(kinds);
        // While the API server did not serve a kind, it reported the objects of that kind as absent.
        self.absent_owners().clear();
    }

    fn removed(&self) -> MutexGuard<'_, Removed> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the objects of a kind that is not served any more from the graph. If the kind's definition was deleted,
    /// its objects were deleted too. Their dependents are queued, because the watch may have ended before the last
    /// deletions. Otherwise the objects may still exist, so their dependents are kept.
    fn remove_unserved(&self, kind: &Arc<ApiKind>) {
        let is_removed = {
            let mut removed = self.removed();
            let is_removed = removed.definitions.contains(&kind.name());
            if is_removed && removed.kinds.len() < MAX_REMOVED {
                let pair = (kind.resource.group.clone(), kind.resource.kind.clone());
                removed.kinds.insert(pair, kind.name());
            }
            is_removed
        };
        let objects = self.lock().of_kind(kind);
        for uid in objects {
            if is_removed {
                let work = self.lock().remove(&uid);
                self.enqueue(work);
            } else {
                self.lock().remove_unserved(&uid);
            }
        }
    }

    /// Records whether a definition of a custom resource exists.
    fn record_definition(&self, kind: &ApiKind, name: Option<&str>, exists: bool) {
        let Some(name) = name.filter(|_| kind.resource.plural == "customresourcedefinitions") else { return };
        if !kind.defines_kinds() {
            return;
        }
        let mut removed = self.removed();
        if exists {
            removed.definitions.remove(name);
        } else if removed.definitions.len() < MAX_REMOVED {
            removed.definitions.insert(name.to_owned());
        }
    }

    fn kind(&self, group: &str, kind: &str) -> Option<Arc<ApiKind>> {
        let kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        kinds.iter().find(|own| own.resource.group == group && own.resource.kind == kind).cloned()
    }

    /// Registers handlers at the shared caches. Returns their kinds.
    fn register_handlers(self: &Arc<Self>, context: &Context) -> HashSet<String> {
        let caches = &context.caches;
        let shared_kinds = [
            self.register_handler(&caches.pods),
            self.register_handler(&caches.replica_sets),
            self.register_handler(&caches.deployments),
            self.register_handler(&caches.nodes),
            self.register_handler(&caches.namespaces),
            self.register_handler(&caches.service_accounts),
            self.register_handler(&caches.services),
            self.register_handler(&caches.endpoints),
        ];
        shared_kinds.into_iter().flatten().collect()
    }

    fn register_handler<K: Object>(self: &Arc<Self>, cache: &Arc<Cache<K>>) -> Option<String> {
        let kind = self.kind(&K::group(&()), &K::kind(&()))?;
        let (own, name) = (self.clone(), kind.name());
        cache.on_change_and_now(move |change| {
            let work = match (change.new, change.old) {
                (Some(new), old) => {
                    // If the new object has another uid, the old object of this name was deleted.
                    let replaced = old.filter(|old| old.uid() != new.uid());
                    let mut work = replaced.map(|old| own.lock().remove(old.uid())).unwrap_or_default();
                    let more = own.lock().set(&kind, new.meta());
                    work.attempt.extend(more.attempt);
                    work.orphan.extend(more.orphan);
                    work
                }
                (None, Some(old)) => own.lock().remove(old.uid()),
                (None, None) => FollowUp::default(),
            };
            own.enqueue(work);
        });
        Some(name)
    }

    fn apply_event(&self, kind: &Arc<ApiKind>, event: Event<Meta>, seen: &mut HashSet<String>) {
        match event {
            Event::Init => seen.clear(),
            Event::InitApply(object) => {
                self.record_definition(kind, object.metadata.name.as_deref(), true);
                seen.extend(object.metadata.uid.clone());
                let work = self.lock().set(kind, &object.metadata);
                self.enqueue(work);
            }
            Event::Apply(object) => {
                self.record_definition(kind, object.metadata.name.as_deref(), true);
                let work = self.lock().set(kind, &object.metadata);
                self.enqueue(work);
            }
            Event::Delete(object) => {
                let (meta, of) = (object.metadata, |field: Option<String>| field.unwrap_or_default());
                let key = Key::new(&of(meta.namespace), &of(meta.name));
                self.forget(kind, &of(meta.uid), Some(&key));
            }
            Event::InitDone => {
                let gone = self.lock().of_kind(kind).into_iter().filter(|uid| !seen.contains(uid));
                for uid in gone.collect::<Vec<_>>() {
                    let key = self.lock().get(&uid).map(|item| item.key.clone());
                    self.forget(kind, &uid, key.as_ref());
                }
                *seen = HashSet::new();
            }
        }
    }

    /// Removes an object that was deleted.
    fn forget(&self, kind: &ApiKind, uid: &str, key: Option<&Key>) {
        self.record_definition(kind, key.map(|key| key.name.as_str()), false);
        let work = self.lock().remove(uid);
        self.enqueue(work);
        key.into_iter().for_each(|key| self.deletions.notify(&kind.resource, &key.namespace));
    }

    /// Reconciles one object.
    async fn attempt(&self, context: &Context, uid: String) -> Result<Next, Error> {
        let (item, dependents) = {
            let graph = self.lock();
            let Some(item) = graph.get(&uid).filter(|_| graph.is_suspect(&uid)).cloned() else {
                return Ok(Next::Wait);
            };
            (item, graph.observe_dependents(&uid))
        };
        let live = item.kind.live(&context.client, &item.key).await?;
        let Some(live) = live.filter(|live| live.metadata.uid.as_ref() == Some(&uid)) else {
            // Do not wait until the watch reports the deletion: queue the dependents immediately.
            let work = self.lock().remove(&uid);
            self.enqueue(work);
            return Ok(Next::Wait);
        };
        let references = live.metadata.owner_references.as_deref().unwrap_or_default();
        let owners = self.owners(context, &item, references).await?;
        for (owner, _) in owners.iter().filter(|(_, state)| *state == Owner::Absent) {
            if self.is_foreign(&item, owner) {
                let event = foreign_owner(owner, &item.key.namespace);
                context.recorder.record(item.reference(&uid), COMPONENT, event);
            }
        }
        let observed = ObservedObject {
            meta: &live.metadata,
            owners,
            has_dependents: dependents.count > 0,
            has_blocking_dependents: dependents.has_blocking,
            has_waiting_dependents: dependents.has_waiting,
        };
        match plan(&observed) {
            Action::Nothing => {}
            Action::Finish if !self.has_core.load(Ordering::Acquire) => {}
            Action::AttemptDependents => {
                // A dependent that waits for its own dependents is queued after their deletion. Two objects that wait
                // for each other must not queue each other without end.
                let graph = self.lock();
                let mut blocking = graph.blocking_dependents(&uid);
                blocking.retain(|uid| graph.get(uid).is_none_or(|item| !item.is_foreground()));
                drop(graph);
                self.enqueue(FollowUp { attempt: blocking, orphan: Vec::new() });
                // Each deletion of a dependent queues the object again, and each attempt reads all dependents.
                return Ok(pause_after(dependents.count));
            }
            action => apply(context, &item.kind, &item.key, &live.metadata, action).await?,
        }
        Ok(Next::Wait)
    }

    /// Whether an owner exists in another namespace, where it cannot own the object.
    fn is_foreign(&self, item: &Item, owner: &OwnerReference) -> bool {
        self.lock().get(&owner.uid).is_some_and(|known| item.owner_state(known) == Owner::Absent)
    }

    /// The states of the owners of an object, in the order of the references.
    async fn owners<'a>(
        &self,
        context: &Context,
        item: &Item,
        references: &'a [OwnerReference],
    ) -> Result<Vec<(&'a OwnerReference, Owner)>, Error> {
        let mut lookups = Vec::with_capacity(references.len());
        for owner in references {
            lookups.push(async move {
                let state = self.owner(context, item, owner).await;
                state.map(|state| (owner, state))
            });
        }
        futures::stream::iter(lookups).buffered(MAX_LOOKUPS).try_collect().await
    }

    /// The state of an owner. Owners that are not in the graph are looked up in the API server.
    async fn owner(&self, context: &Context, item: &Item, owner: &OwnerReference) -> Result<Owner, Error> {
        {
            let graph = self.lock();
            if let Some(known) = graph.get(&owner.uid) {
                return Ok(item.owner_state(known));
            }
            if graph.was_deleted_lately(&owner.uid) {
                return Ok(Owner::Absent);
            }
        }
        let group = owner.api_version.rsplit_once('/').map(|(group, _)| group).unwrap_or_default();
        let Some(kind) = self.kind(group, &owner.kind) else {
            return self.owner_of_unknown_kind(context, group, &owner.kind).await;
        };
        if kind.namespaced && item.key.namespace.is_empty() {
            return Ok(Owner::Existing);
        }
        let namespace = if kind.namespaced { item.key.namespace.as_str() } else { "" };
        if self.absent_owners().has(namespace, owner) {
            return Ok(Owner::Absent);
        }
        let live = kind.live(&context.client, &Key::new(namespace, &owner.name)).await?;
        let same = live.is_some_and(|live| live.metadata.uid.as_ref() == Some(&owner.uid));
        if same {
            return Ok(Owner::Existing);
        }
        self.absent_owners().add(namespace, owner);
        Ok(Owner::Absent)
    }

    fn absent_owners(&self) -> MutexGuard<'_, AbsentOwners> {
        self.absent_owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of an owner whose kind is not served. The owner cannot be read. It counts as absent if the definition
    /// of its kind was deleted and was not created again. Otherwise it counts as existing.
    async fn owner_of_unknown_kind(
        &self,
        context: &Context,
        group: &str,
        kind: &str,
    ) -> Result<Owner, Error> {
        let definition = self.removed().kinds.get(&(group.to_owned(), kind.to_owned())).cloned();
        let definitions = self.kind("apiextensions.k8s.io", "CustomResourceDefinition");
        let Some((definition, definitions)) = definition.zip(definitions) else { return Ok(Owner::Existing) };
        // The watch may be late: a new definition may have objects before its event arrives.
        let live = definitions.live(&context.client, &Key::new("", &definition)).await?;
        Ok(if live.is_some() { Owner::Existing } else { Owner::Absent })
    }

    /// Orphans the dependents of queued objects, forever.
    async fn orphan_all(&self, context: &Context) {
        let work = move |_worker: usize| {
            self.orphans.work("garbage-orphan", move |key: Key| self.orphan(context, key.name))
        };
        join_all((0..ORPHAN_WORKERS).map(work)).await;
    }

    /// Orphans all dependents of one object, then removes the object's finalizer.
    async fn orphan(&self, context: &Context, uid: String) -> Result<Next, Error> {
        let (item, dependents) = {
            let graph = self.lock();
            let Some(item) = graph.get(&uid).cloned() else { return Ok(Next::Wait) };
            let dependents: Vec<_> =
                graph.own_dependents(&uid).iter().filter_map(|uid| graph.get(uid).cloned()).collect();
            (item, dependents)
        };
        for dependent in dependents {
            let Some(live) = dependent.kind.live(&context.client, &dependent.key).await? else { continue };
            let all = live.metadata.owner_references.iter().flatten();
            let kept = all.filter(|owner| owner.uid != uid).cloned().collect();
            apply(context, &dependent.kind, &dependent.key, &live.metadata, Action::KeepOwners(kept)).await?;
        }
        let live = item.kind.live(&context.client, &item.key).await?;
        if let Some(live) = live.filter(|live| live.metadata.uid.as_ref() == Some(&uid)) {
            drop_finalizer(context, &item.kind, &item.key, &live.metadata, ORPHAN).await?;
        }
        Ok(Next::Wait)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use serde_json::json;
    use tokio::sync::Barrier;

    use super::*;
    use crate::config::ControllersConfig;
    use crate::garbage::plan::FOREGROUND;
    use crate::garbage::plan::tests::kind;

    #[test]
    fn deletions_are_reported_with_their_namespace() {
        let (collector, thing) = (collector(), kind("Thing", true));
        let reported = Arc::new(Mutex::new(Vec::new()));
        let own = reported.clone();
        collector.deletions.listen(move |resource, namespace| {
            own.lock().unwrap().push(format!("{} {namespace}", resource.kind));
        });
        let of = |namespace: &str| object(json!({"name": "o", "namespace": namespace, "uid": namespace}));
        let mut seen = HashSet::new();
        for namespace in ["a", "b", "c"] {
            collector.apply_event(&thing, Event::Apply(of(namespace)), &mut seen);
        }
        collector.apply_event(&thing, Event::Delete(of("a")), &mut seen);
        // The watch begins again, and one object does not exist any more.
        for event in [Event::Init, Event::InitApply(of("b")), Event::InitDone] {
            collector.apply_event(&thing, event, &mut seen);
        }
        assert_eq!(*reported.lock().unwrap(), ["Thing a", "Thing c"]);
    }

    fn object(value: serde_json::Value) -> Meta {
        serde_json::from_value(json!({"apiVersion": "v1", "kind": "K", "metadata": value})).unwrap()
    }

    fn collector() -> Collector {
        Collector {
            graph: Mutex::default(),
            attempts: Queue::new(),
            orphans: Queue::new(),
            kinds: Mutex::default(),
            removed: Mutex::default(),
            absent_owners: Mutex::default(),
            deletions: Arc::default(),
            kinds_changed: Notify::new(),
            has_core: AtomicBool::new(false),
        }
    }

    /// A context whose API server has no objects, and the number of its reads. It responds when `together` reads have
    /// arrived.
    fn empty_api(together: usize) -> (Context, Arc<AtomicUsize>) {
        let (reads, barrier) = (Arc::<AtomicUsize>::default(), Arc::new(Barrier::new(together)));
        let counter = reads.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (counter, barrier) = (counter.clone(), barrier.clone());
            let name = request.uri().path().rsplit('/').next().map(str::to_owned);
            async move {
                counter.fetch_add(1, Ordering::Relaxed);
                barrier.wait().await;
                let missing = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                    "reason": "NotFound", "message": "not found", "details": {"name": name}});
                let mut response = http::Response::new(missing.to_string());
                *response.status_mut() = http::StatusCode::NOT_FOUND;
                Ok::<_, Infallible>(response)
            }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        (Context::new(client, recorder, ControllersConfig::default()), reads)
    }

    #[tokio::test(start_paused = true)]
    async fn absent_owners_are_read_together_and_only_once() {
        let (context, reads) = empty_api(MAX_LOOKUPS);
        let (collector, thing) = (collector(), kind("Thing", true));
        collector.set_kinds(vec![thing.clone()]);
        let reference = |number: usize| OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Thing".to_owned(),
            name: format!("owner-{number}"),
            uid: number.to_string(),
            ..OwnerReference::default()
        };
        let references: Vec<_> = (0..2 * MAX_LOOKUPS).map(reference).collect();
        let meta = json!({"name": "child", "namespace": "n", "uid": "child", "ownerReferences": references});
        collector.apply_event(&thing, Event::Apply(object(meta)), &mut HashSet::new());
        let item = collector.lock().get("child").cloned().unwrap();
        for _ in 0..2 {
            // Without a response to the reads, the paused clock advances to the timeout.
            let found = collector.owners(&context, &item, &references);
            let found = tokio::time::timeout(Duration::from_secs(60), found).await.unwrap().unwrap();
            let expect: Vec<_> = references.iter().map(|owner| (owner, Owner::Absent)).collect();
            assert_eq!(found, expect);
            assert_eq!(reads.load(Ordering::Relaxed), references.len(), "the second time nothing is read");
        }
    }

    #[tokio::test]
    async fn namespaces_take_turns_in_the_deletions() {
        let (collector, thing) = (collector(), kind("Thing", true));
        let owner = json!({"apiVersion": "v1", "kind": "Thing", "name": "absent", "uid": "absent"});
        for (namespace, uid) in [("many", "m0"), ("many", "m1"), ("many", "m2"), ("one", "o0")] {
            let meta = json!({"name": uid, "namespace": namespace, "uid": uid, "ownerReferences": [owner]});
            collector.apply_event(&thing, Event::Apply(object(meta)), &mut HashSet::new());
        }
        let (sender, mut taken) = tokio::sync::mpsc::unbounded_channel();
        let work = collector.attempts.work("test", |key: Key| {
            sender.send(key.name).unwrap();
            async { Ok(Next::Wait) }
        });
        let order = async {
            let mut order = Vec::new();
            while order.len() < 4 {
                order.push(taken.recv().await.unwrap());
            }
            order
        };
        let order = tokio::select! {
            () = work => unreachable!("work has no end"),
            order = order => order,
        };
        assert_eq!(order, ["m0", "o0", "m1", "m2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_namespace_with_long_orphanings_leaves_a_worker_for_others() {
        let (sender, mut written) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (sender, path) = (sender.clone(), request.uri().path().to_owned());
            let is_read = request.method() == http::Method::GET;
            async move {
                if path.contains("/slow/") {
                    std::future::pending::<()>().await;
                }
                if !is_read {
                    sender.send(path).unwrap();
                }
                let live = json!({"name": "fast", "namespace": "n", "uid": "fast", "finalizers": [ORPHAN]});
                Ok::<_, Infallible>(http::Response::new(serde_json::to_string(&object(live)).unwrap()))
            }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        let context = Context::new(client, recorder, ControllersConfig::default());
        let orphans = Queue::shared(Arc::default(), ORPHAN_WORKERS);
        let (collector, thing) = (Collector { orphans, ..collector() }, kind("Thing", true));
        for (namespace, uid) in [("slow", "s0"), ("slow", "s1"), ("n", "fast")] {
            let meta = json!({"name": uid, "namespace": namespace, "uid": uid, "finalizers": [ORPHAN],
                "deletionTimestamp": "2026-01-01T00:00:00Z"});
            collector.apply_event(&thing, Event::Apply(object(meta)), &mut HashSet::new());
        }
        // The time limit is shorter than the timeout of a reconcile, which would free the slow workers after ten
        // minutes.
        let path = tokio::select! {
            () = collector.orphan_all(&context) => unreachable!("work has no end"),
            path = tokio::time::timeout(Duration::from_secs(60), written.recv()) => path.unwrap().unwrap(),
        };
        assert!(path.ends_with("/fast"), "{path}");
    }

    #[tokio::test]
    async fn an_object_with_many_blocking_dependents_rests_after_an_attempt() {
        let meta = json!({"name": "owner", "namespace": "n", "uid": "owner",
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FOREGROUND]});
        let live = object(meta.clone());
        let service = tower::service_fn(move |_request: http::Request<kube::client::Body>| {
            let response = http::Response::new(serde_json::to_string(&live).unwrap());
            async move { Ok::<_, Infallible>(response) }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        let context = Context::new(client, recorder, ControllersConfig::default());
        let (collector, thing) = (collector(), kind("Thing", true));
        collector.apply_event(&thing, Event::Apply(object(meta)), &mut HashSet::new());
        let reference = json!({"apiVersion": "v1", "kind": "Thing", "name": "owner", "uid": "owner",
            "blockOwnerDeletion": true});
        for number in 0..1000 {
            let uid = format!("child-{number}");
            let meta = json!({"name": uid, "namespace": "n", "uid": uid, "ownerReferences": [reference]});
            collector.apply_event(&thing, Event::Apply(object(meta)), &mut HashSet::new());
        }
        let next = collector.attempt(&context, "owner".to_owned()).await.unwrap();
        assert!(matches!(next, Next::Pause(_)), "each deletion of a dependent would start an attempt");
    }

    #[tokio::test]
    async fn a_foreground_deletion_ends_after_the_first_lists_of_the_core_group() {
        let meta = json!({"name": "owner", "namespace": "n", "uid": "owner",
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FOREGROUND]});
        let writes = Arc::<AtomicUsize>::default();
        let (counter, live) = (writes.clone(), object(meta.clone()));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            if request.method() != http::Method::GET {
                counter.fetch_add(1, Ordering::Relaxed);
            }
            let response = http::Response::new(serde_json::to_string(&live).unwrap());
            async move { Ok::<_, Infallible>(response) }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        let context = Context::new(client, recorder, ControllersConfig::default());
        let (collector, thing, secret) = (collector(), kind("Thing", true), kind("Secret", true));
        collector.apply_event(&thing, Event::Apply(object(meta)), &mut HashSet::new());
        collector.attempt(&context, "owner".to_owned()).await.unwrap();
        assert_eq!(writes.load(Ordering::Relaxed), 0, "a Secret may block the deletion");
        let (list, first) = tokio::sync::oneshot::channel::<()>();
        let mut listed = FirstLists::default();
        listed.add(&secret, first);
        let mut complete = std::pin::pin!(collector.complete(listed));
        assert!(futures::poll!(complete.as_mut()).is_pending());
        drop(list);
        complete.await;
        assert_eq!(collector.lock().foreground(), ["owner"]);
        collector.attempt(&context, "owner".to_owned()).await.unwrap();
        assert_eq!(writes.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn absent_owners_are_looked_up_again_when_the_served_kinds_change() {
        let (collector, owner) = (collector(), OwnerReference::default());
        collector.absent_owners().add("n", &owner);
        assert!(collector.absent_owners().has("n", &owner));
        collector.set_kinds(Vec::new());
        assert!(!collector.absent_owners().has("n", &owner));
    }

    #[tokio::test]
    async fn an_owner_in_another_namespace_is_reported() {
        let (collector, kind, mut seen) = (collector(), kind("Thing", true), HashSet::new());
        let reference = json!({"apiVersion": "v1", "kind": "Thing", "name": "owner", "uid": "owner"});
        for (namespace, uid, owners) in [
            ("a", "owner", json!([])),
            ("a", "own", json!([reference])),
            ("b", "foreign", json!([reference])),
        ] {
            let meta = json!({"name": uid, "namespace": namespace, "uid": uid, "ownerReferences": owners});
            collector.apply_event(&kind, Event::Apply(object(meta)), &mut seen);
        }
        let owner: OwnerReference = serde_json::from_value(reference).unwrap();
        let item = |uid: &str| collector.lock().get(uid).cloned().unwrap();
        assert!(
            collector.is_foreign(&item("foreign"), &owner) && !collector.is_foreign(&item("own"), &owner)
        );
        let about = item("foreign").reference("foreign");
        assert_eq!((about.namespace.as_deref(), about.uid.as_deref()), (Some("b"), Some("foreign")));
        let event = foreign_owner(&owner, "b");
        let expect =
            "ownerRef [v1/Thing, namespace: b, name: owner, uid: owner] does not exist in namespace \"b\"";
        assert_eq!((event.reason, &*event.message), ("OwnerRefInvalidNamespace", expect));
    }

    #[tokio::test]
    async fn dependents_of_a_removed_custom_resource_are_collected_and_those_of_another_kind_stay() {
        let collector = collector();
        let definitions = ApiKind {
            resource: kube::core::ApiResource {
                group: "apiextensions.k8s.io".to_owned(),
                version: "v1".to_owned(),
                api_version: "apiextensions.k8s.io/v1".to_owned(),
                kind: "CustomResourceDefinition".to_owned(),
                plural: "customresourcedefinitions".to_owned(),
            },
            namespaced: false,
            verbs: Vec::new(),
        };
        let (definitions, children) = (Arc::new(definitions), kind("Child", true));
        let mut seen = HashSet::new();
        for (name, was_deleted) in [("Gone", true), ("Kept", false)] {
            let owners = kind(name, true);
            let child = format!("child of {name}");
            let reference = json!({"apiVersion": "v1", "kind": name, "name": name, "uid": name});
            let owner = object(json!({"name": name, "namespace": "n", "uid": name}));
            let of_owner = object(
                json!({"name": child, "namespace": "n", "uid": child, "ownerReferences": [reference]}),
            );
            collector.apply_event(&owners, Event::Apply(owner), &mut seen);
            collector.apply_event(&children, Event::Apply(of_owner), &mut seen);
            if was_deleted {
                let definition = object(json!({"name": owners.name(), "uid": "definition"}));
                collector.apply_event(&definitions, Event::Apply(definition.clone()), &mut seen);
                collector.apply_event(&definitions, Event::Delete(definition), &mut seen);
            }
            collector.remove_unserved(&owners);
            assert_eq!(collector.lock().was_deleted_lately(name), was_deleted, "{name}");
            let pair = (owners.resource.group.clone(), owners.resource.kind.clone());
            assert_eq!(collector.removed().kinds.contains_key(&pair), was_deleted, "{name}");
        }
    }
}
