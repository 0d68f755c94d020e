//! Finds the services that select a pod, and the pods that a service selects, without a pass over the namespace.
//!
//! Each selector is registered at one of its label pairs, the anchor. A pod that the selector selects has that pair. So
//! a pod is compared only with the selectors at its own pairs, and a selector only with the pods that have its anchor.
//! Equal selectors share one entry. The memory is proportional to the number of services, and to the labels of pods
//! that are anchors.
//!
//! Order of locks: the cache of services or of pods first, then this index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cache::{Cache, Change, Objects};
use crate::object::{Key, ObjectExt, Pod};

type Labels = BTreeMap<String, String>;

/// The selectors of services by namespace. Namespaces without selectors are absent.
#[derive(Default)]
pub(crate) struct SelectorIndex(Mutex<HashMap<String, Namespace>>);

#[derive(Default)]
struct Namespace {
    /// The services that have a selector, by name.
    services: HashMap<String, Selecting>,
    /// The anchor of each selector.
    anchors: HashMap<Arc<Labels>, String>,
    pairs: HashMap<String, Anchor>,
}

/// A service that selects pods.
struct Selecting {
    selector: Arc<Labels>,
    /// The number of services that select the pod of this service that changed last. The largest number so far is not
    /// used: a deleted pod with many services must not delay this service.
    sharing: usize,
}

/// A label pair at which selectors are registered.
#[derive(Default)]
struct Anchor {
    /// The names of the services by selector.
    selectors: HashMap<Arc<Labels>, BTreeSet<String>>,
    /// The names of the pods with this pair. `None` until a service needs them.
    pods: Option<BTreeSet<Arc<str>>>,
}

/// The text of a label pair. A label's name has no `=`.
fn pair(name: &str, value: &str) -> String {
    format!("{name}={value}")
}

fn has_all(labels: &Labels, selector: &Labels) -> bool {
    selector.iter().all(|(name, value)| labels.get(name) == Some(value))
}

// === impl SelectorIndex ===

impl SelectorIndex {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Namespace>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the selector of a service. `None` if the service does not select pods any more.
    pub(crate) fn follow_service(&self, service: &Key, selector: Option<&Labels>) {
        let mut all = self.lock();
        let known = all.get(&service.namespace).and_then(|namespace| namespace.services.get(&service.name));
        if known.map(|known| &*known.selector) == selector {
            return;
        }
        let namespace = all.entry(service.namespace.clone()).or_default();
        namespace.remove(&service.name);
        if let Some(selector) = selector {
            namespace.add(&service.name, selector);
        }
        if namespace.services.is_empty() {
            all.remove(&service.namespace);
        }
    }

    /// Follows the labels of a pod.
    pub(crate) fn follow_pod(&self, change: &Change<'_, Pod>) {
        let (old, new) = (labels_of(change.old), labels_of(change.new));
        let Some(pod) = change.latest().filter(|_| old != new) else { return };
        let mut all = self.lock();
        let Some(namespace) = all.get_mut(pod.namespace()) else { return };
        for (name, value) in old.into_iter().flatten() {
            if let Some(pods) = namespace.known_pods(name, value) {
                pods.remove(pod.name());
            }
        }
        let pod: Arc<str> = pod.name().into();
        for (name, value) in new.into_iter().flatten() {
            if let Some(pods) = namespace.known_pods(name, value) {
                pods.insert(pod.clone());
            }
        }
    }

    /// The services that select the pod before or after a change, in the order of their names.
    pub(crate) fn services_of(&self, change: &Change<'_, Pod>) -> Vec<Key> {
        let (old, new) = (labels_of(change.old), labels_of(change.new));
        let Some(pod) = change.latest() else { return Vec::new() };
        let mut all = self.lock();
        let Some(namespace) = all.get_mut(pod.namespace()) else { return Vec::new() };
        let mut found: BTreeSet<String> = BTreeSet::new();
        for labels in old.into_iter().chain(new.filter(|_| old != new)) {
            let selecting = namespace.candidates(labels).filter(|(selector, _)| has_all(labels, selector));
            selecting.for_each(|(_, services)| found.extend(services.iter().cloned()));
        }
        let count = found.len();
        for service in &found {
            if let Some(service) = namespace.services.get_mut(service) {
                service.sharing = count;
            }
        }
        found.into_iter().map(|name| Key { namespace: pod.namespace().to_owned(), name }).collect()
    }

    /// The number of services that share pods with this service: the number of services that select the pod of this
    /// service that changed last. It is at most the current number of services in the namespace.
    pub(crate) fn sharing(&self, service: &Key) -> usize {
        let all = self.lock();
        let Some(namespace) = all.get(&service.namespace) else { return 0 };
        let sharing = namespace.services.get(&service.name).map_or(0, |service| service.sharing);
        sharing.min(namespace.services.len())
    }

    /// The pods that a selector selects, in the order of their names.
    pub(crate) fn pods_of(
        &self,
        pods: &Cache<Pod>,
        namespace: &str,
        selector: Option<&Labels>,
    ) -> Vec<Arc<Pod>> {
        let Some(selector) = selector else { return Vec::new() };
        pods.read(|pods| {
            let mut candidates = self.candidate_pods(pods, namespace, selector);
            candidates.retain(|pod| labels_of(Some(pod)).is_some_and(|labels| has_all(labels, selector)));
            candidates
        })
    }

    /// The pods to compare with a selector. The first call for an anchor reads all pods of the namespace.
    fn candidate_pods(&self, pods: &Objects<'_, Pod>, namespace: &str, selector: &Labels) -> Vec<Arc<Pod>> {
        let mut all = self.lock();
        // If the selector has no anchor, the service already has another selector. This change has queued the service
        // again.
        let Some((pair_text, anchor)) = all.get_mut(namespace).and_then(|all| all.anchor_of(selector)) else {
            return pods.in_namespace(namespace);
        };
        let (name, value_of_anchor) = pair_text.split_once('=').unwrap_or((pair_text, ""));
        let names = anchor.pods.get_or_insert_with(|| {
            let has_pair = |pod: &&Arc<Pod>| {
                let value = labels_of(Some(*pod)).and_then(|labels| labels.get(name));
                value.map(String::as_str) == Some(value_of_anchor)
            };
            pods.in_namespace(namespace).iter().filter(has_pair).map(|pod| pod.name().into()).collect()
        });
        let mut key = Key::new(namespace, "");
        let found = names.iter().filter_map(|name| {
            key.name.clear();
            key.name.push_str(name);
            pods.get(&key).cloned()
        });
        found.collect()
    }
}

fn labels_of(pod: Option<&Arc<Pod>>) -> Option<&Labels> {
    pod.and_then(|pod| pod.metadata.labels.as_ref())
}

// === impl Namespace ===

impl Namespace {
    fn add(&mut self, service: &str, selector: &Labels) {
        let known =
            self.anchors.get_key_value(selector).map(|(known, anchor)| (known.clone(), anchor.clone()));
        let new = || Some((Arc::new(selector.clone()), self.new_anchor(selector)?));
        let Some((selector, anchor)) = known.or_else(new) else { return };
        self.anchors.insert(selector.clone(), anchor.clone());
        let services = self.pairs.entry(anchor).or_default().selectors.entry(selector.clone()).or_default();
        services.insert(service.to_owned());
        self.services.insert(service.to_owned(), Selecting { selector, sharing: 0 });
    }

    /// The pair of the selector at which the fewest selectors are registered. So few selectors are registered at common
    /// pairs, such as the name of a release.
    fn new_anchor(&self, selector: &Labels) -> Option<String> {
        let pairs = selector.iter().rev().map(|(name, value)| pair(name, value));
        pairs.min_by_key(|pair| self.pairs.get(pair).map_or(0, |anchor| anchor.selectors.len()))
    }

    fn remove(&mut self, service: &str) {
        let Some(Selecting { selector, .. }) = self.services.remove(service) else { return };
        let Some(pair) = self.anchors.get(&selector) else { return };
        let Some(anchor) = self.pairs.get_mut(pair) else { return };
        let Some(services) = anchor.selectors.get_mut(&selector) else { return };
        services.remove(service);
        if !services.is_empty() {
            return;
        }
        anchor.selectors.remove(&selector);
        if anchor.selectors.is_empty() {
            self.pairs.remove(pair);
        }
        self.anchors.remove(&selector);
    }

    /// The pair at which a selector is registered.
    fn anchor_of(&mut self, selector: &Labels) -> Option<(&str, &mut Anchor)> {
        let pair = self.anchors.get(selector)?;
        Some((pair.as_str(), self.pairs.get_mut(pair)?))
    }

    /// The pods with a pair, if the pair is an anchor whose pods are known.
    fn known_pods(&mut self, name: &str, value: &str) -> Option<&mut BTreeSet<Arc<str>>> {
        self.pairs.get_mut(&pair(name, value))?.pods.as_mut()
    }

    /// The selectors to compare with labels, with their services.
    fn candidates(&self, labels: &Labels) -> impl Iterator<Item = (&Arc<Labels>, &BTreeSet<String>)> {
        let anchors = labels.iter().filter_map(move |(name, value)| self.pairs.get(&pair(name, value)));
        anchors.flat_map(|anchor| &anchor.selectors)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn pod(name: &str, version: u32, labels: &Value) -> Pod {
        let metadata = json!({"name": name, "namespace": "d", "uid": name, "labels": labels,
            "resourceVersion": version.to_string()});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    /// A cache of pods that an index follows.
    fn followed() -> (Arc<SelectorIndex>, Cache<Pod>) {
        let (index, pods) = (Arc::new(SelectorIndex::default()), Cache::new());
        let own = index.clone();
        pods.on_change(move |change| own.follow_pod(change));
        (index, pods)
    }

    fn select(index: &SelectorIndex, service: &str, selector: &[(&str, &str)]) {
        index.follow_service(&Key::new("d", service), Some(&labels(selector)));
    }

    fn services(index: &SelectorIndex, pod: Pod) -> Vec<String> {
        let found = index.services_of(&Change { old: None, new: Some(&Arc::new(pod)) });
        found.into_iter().map(|key| key.name).collect()
    }

    fn pods(index: &SelectorIndex, pods: &Cache<Pod>, selector: &[(&str, &str)]) -> Vec<String> {
        let found = index.pods_of(pods, "d", Some(&labels(selector)));
        found.iter().map(|pod| pod.name().to_owned()).collect()
    }

    #[test]
    fn a_service_visits_its_own_pods_only() {
        let (index, cache) = followed();
        for number in 0..1000 {
            let labels = json!({"app": format!("a{}", number % 100), "tier": "x"});
            cache.written(pod(&format!("p{number:04}"), number + 1, &labels));
        }
        let selector = labels(&[("app", "a7")]);
        select(&index, "web", &[("app", "a7")]);
        let visited = || cache.read(|pods| index.candidate_pods(pods, "d", &selector).len());
        assert_eq!(visited(), 10);
        cache.written(pod("p0007", 2000, &json!({"app": "a8"})));
        cache.written(pod("p0008", 2001, &json!({"app": "a7"})));
        cache.written(pod("q", 2002, &json!({"app": "a7"})));
        cache.removed(&Key::new("d", "p0107"), "p0107");
        assert_eq!(visited(), 10);
        let found = pods(&index, &cache, &[("app", "a7")]);
        assert_eq!((found.len(), &*found[0], &*found[1], &*found[9]), (10, "p0008", "p0207", "q"));
    }

    #[test]
    fn a_pod_is_compared_with_few_selectors() {
        let (index, _) = followed();
        for number in 0..1000 {
            let unit = format!("u{number}");
            select(&index, &format!("s{number}"), &[("app", "a"), ("unit", unit.as_str())]);
            select(&index, &format!("t{number}"), &[("app", "b")]);
        }
        let all = index.lock();
        let compared = |pairs: &[(&str, &str)]| all["d"].candidates(&labels(pairs)).count();
        assert!(compared(&[("app", "a"), ("unit", "u7")]) <= 2);
        assert_eq!(compared(&[("app", "b")]), 1, "equal selectors are compared once");
        drop(all);
        assert_eq!(services(&index, pod("p", 1, &json!({"app": "a", "unit": "u7"}))), ["s7"]);
        assert_eq!(services(&index, pod("p", 1, &json!({"app": "b"}))).len(), 1000);
        assert_eq!(services(&index, pod("p", 1, &json!({"app": "c"}))).len(), 0);
    }

    #[test]
    fn both_labels_of_a_changed_pod_count() {
        let (index, _) = followed();
        select(&index, "one", &[("app", "a")]);
        select(&index, "two", &[("app", "b")]);
        let (old, new) =
            (Arc::new(pod("p", 1, &json!({"app": "a"}))), Arc::new(pod("p", 2, &json!({"app": "b"}))));
        let found = index.services_of(&Change { old: Some(&old), new: Some(&new) });
        assert_eq!(found, [Key::new("d", "one"), Key::new("d", "two")]);
        assert_eq!(index.sharing(&found[0]), 2);
        index.follow_service(&found[1], None);
        assert_eq!((index.sharing(&found[0]), index.sharing(&found[1])), (1, 0));
    }

    #[test]
    fn a_pod_of_many_services_does_not_count_after_a_change_of_a_pod_of_few() {
        let (index, _) = followed();
        for number in 0..100 {
            select(&index, &format!("s{number}"), &[(format!("l{number}").as_str(), "x")]);
        }
        let all: HashMap<String, &str> = (0..100).map(|number| (format!("l{number}"), "x")).collect();
        assert_eq!(services(&index, pod("many", 1, &json!(all))).len(), 100);
        let key = Key::new("d", "s7");
        assert_eq!(index.sharing(&key), 100);
        assert_eq!(services(&index, pod("few", 2, &json!({"l7": "x"}))), ["s7"]);
        assert_eq!((index.sharing(&key), index.sharing(&Key::new("d", "s8"))), (1, 100));
    }

    #[test]
    fn a_service_with_another_selector_or_without_one_leaves_nothing() {
        let (index, cache) = followed();
        cache.written(pod("p", 1, &json!({"app": "a"})));
        cache.written(pod("q", 2, &json!({"app": "b"})));
        select(&index, "web", &[("app", "a")]);
        assert_eq!(pods(&index, &cache, &[("app", "a")]), ["p"]);
        assert_eq!(pods(&index, &cache, &[("app", "b")]), ["q"], "a selector that is not registered");
        select(&index, "web", &[("app", "b")]);
        assert_eq!(pods(&index, &cache, &[("app", "b")]), ["q"]);
        assert_eq!(index.lock()["d"].pairs.len(), 1);
        index.follow_service(&Key::new("d", "web"), None);
        assert!(index.lock().is_empty());
        assert!(index.pods_of(&cache, "d", None).is_empty());
    }
}
