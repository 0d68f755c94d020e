//! Watches the policies of the whole cluster. Their kinds are custom resources that a cluster may lack.
//!
//! A watch of the kind's definition, by its name, shows whether the kind exists. Objects are watched only if the kind
//! exists.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_error_chain::chain;
use coracle_network_policy::{ClusterKind, ClusterPolicy, InvalidPolicy, Model};
use coracle_watch::{Config, Error, Event};
use futures::stream::{self, StreamExt};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::core::PartialObjectMeta;
use kube::{Api, Client};

use super::peers::{Events, Received, next, set_failure, watch_with};
use crate::event_recorder::Recorder;

/// First back-off after the API server refused to show a definition. An API server that has just started may refuse
/// requests whose roles it has not read yet.
const FIRST_REFUSED_BACKOFF: Duration = Duration::from_secs(5);
/// Maximum back-off after refusals. Each refusal doubles the back-off. On a stock control plane every request may be
/// refused, because the agent may lack the right.
const MAX_REFUSED_BACKOFF: Duration = Duration::from_secs(600);
const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;

type Definition = PartialObjectMeta<CustomResourceDefinition>;

/// The kinds of policies of the whole cluster.
pub(super) struct ClusterPolicies {
    client: Client,
    recorder: Recorder,
    kinds: [Kind; 3],
}

/// A kind, and the watches of its definition and objects.
struct Kind {
    kind: ClusterKind,
    definition: Events<Definition>,
    /// Back-off after a refusal to show the definition.
    refused_backoff: Backoff,
    is_defined: bool,
    /// Events of the objects. None unless the kind is defined.
    objects: Option<Events<DynamicObject>>,
    /// Whether the last request for objects was refused.
    is_refused: bool,
    /// The reason why the policies are not known. None while the policies are known.
    failure: Option<String>,
    /// Names of the list that is being received.
    listed: HashSet<String>,
    /// Whether the policies are known: all were listed once, the kind did not exist, or the node is not permitted to
    /// read it.
    is_complete: bool,
    /// Unique ids and generations of policies whose problems were reported.
    reported: HashMap<String, (Option<String>, Option<i64>)>,
}

/// Events of the watches of one kind.
pub(super) enum ClusterPolicyEvents {
    Definition(ClusterKind, Vec<Received<Definition>>),
    Objects(ClusterKind, Vec<Received<DynamicObject>>),
}

// === impl ClusterPolicies ===

impl ClusterPolicies {
    pub(super) fn watch(client: &Client, recorder: Recorder) -> Self {
        let kinds = ClusterKind::ALL.map(|kind| Kind::new(client, kind));
        Self { client: client.clone(), recorder, kinds }
    }

    /// Whether the policies of all kinds are known.
    pub(super) fn are_complete(&self) -> bool {
        self.kinds.iter().all(|kind| kind.is_complete)
    }

    /// The reason why the policies of a kind are not known, if a request for them failed.
    pub(super) fn failure(&self) -> Option<&str> {
        self.kinds.iter().find_map(|kind| kind.failure.as_deref().filter(|_| !kind.is_complete))
    }

    /// The next events. Cancel-safe: the streams keep events that were not returned.
    pub(super) async fn next(&mut self) -> Option<ClusterPolicyEvents> {
        let [first, second, third] = &mut self.kinds;
        tokio::select! {
            events = first.next() => events,
            events = second.next() => events,
            events = third.next() => events,
        }
    }

    /// Changes the model by the events. Returns whether policies may have changed.
    pub(super) fn apply(&mut self, events: ClusterPolicyEvents, model: &mut Model) -> bool {
        let Self { client, recorder, kinds } = self;
        let (ClusterPolicyEvents::Definition(kind, _) | ClusterPolicyEvents::Objects(kind, _)) = &events;
        let Some(followed) = kinds.iter_mut().find(|followed| followed.kind == *kind) else { return false };
        match events {
            ClusterPolicyEvents::Definition(_, events) => {
                events.into_iter().for_each(|event| followed.apply_definition_event(event, client, model));
            }
            ClusterPolicyEvents::Objects(_, events) => {
                events.into_iter().for_each(|event| followed.apply_object_event(event, recorder, model));
            }
        }
        true
    }
}

// === impl Kind ===

impl Kind {
    fn new(client: &Client, kind: ClusterKind) -> Self {
        Self {
            kind,
            definition: definition(client, kind),
            refused_backoff: Backoff::new(FIRST_REFUSED_BACKOFF, MAX_REFUSED_BACKOFF),
            is_defined: false,
            objects: None,
            is_refused: false,
            failure: None,
            listed: HashSet::new(),
            is_complete: false,
            reported: HashMap::new(),
        }
    }

    async fn next(&mut self) -> Option<ClusterPolicyEvents> {
        tokio::select! {
            events = self.definition.next() => events.map(|events| ClusterPolicyEvents::Definition(self.kind, events)),
            events = next(self.objects.as_mut()) => events.map(|events| ClusterPolicyEvents::Objects(self.kind, events)),
        }
    }

    fn apply_definition_event(&mut self, event: Received<Definition>, client: &Client, model: &mut Model) {
        match event {
            Ok(Event::Init) => self.is_defined = false,
            Ok(Event::InitApply(_) | Event::Apply(_)) => {
                self.refused_backoff.reset();
                self.is_defined = true;
                // A refused request is repeated at once: the kind may be served now.
                if self.objects.is_none() || std::mem::take(&mut self.is_refused) {
                    self.objects = Some(objects(client, self.kind));
                }
            }
            Ok(Event::InitDone) if self.is_defined => {}
            Ok(Event::InitDone | Event::Delete(_)) => {
                self.is_defined = false;
                self.objects = None;
                self.remove_unlisted(&HashSet::new(), model);
            }
            Err(error) => {
                tracing::debug!(error = chain(&error), kind = self.kind.name(), "a watch failed");
                if matches!(error.code(), Some(FORBIDDEN | NOT_FOUND)) && !self.is_defined {
                    tracing::warn!(
                        error = chain(&error),
                        kind = self.kind.name(),
                        "cannot watch the definition of cluster network policies, none are enforced"
                    );
                    self.is_complete = true;
                    let again = definition(client, self.kind);
                    let delay = stream::once(tokio::time::sleep(self.refused_backoff.next_delay()));
                    self.definition = delay.filter_map(|()| async { None }).chain(again).boxed();
                } else {
                    self.set_failure(&error);
                }
            }
        }
    }

    fn apply_object_event(&mut self, event: Received<DynamicObject>, recorder: &Recorder, model: &mut Model) {
        match event {
            Ok(Event::Init) => self.listed.clear(),
            Ok(Event::InitApply(policy)) => {
                self.listed.extend(policy.metadata.name.clone());
                self.put(&policy, recorder, model);
            }
            Ok(Event::InitDone) => {
                let listed = std::mem::take(&mut self.listed);
                self.is_refused = false;
                self.remove_unlisted(&listed, model);
            }
            Ok(Event::Apply(policy)) => self.put(&policy, recorder, model),
            Ok(Event::Delete(policy)) => {
                let name = policy.metadata.name.unwrap_or_default();
                self.reported.remove(&name);
                model.remove_cluster_policy(self.kind, &name);
            }
            Err(error) => self.record_failure(&error),
        }
    }

    /// Known policies are kept while the kind is not served, or the node is not permitted to read it. Only the removal
    /// of the kind's definition removes them.
    ///
    /// After another failure, for example of a conversion webhook, unknown policies may exist. Then restricted pods
    /// wait, and their status shows the failure.
    fn record_failure(&mut self, error: &Error) {
        tracing::debug!(error = chain(error), kind = self.kind.name(), "a watch failed");
        let Some(FORBIDDEN | NOT_FOUND) = error.code() else {
            return self.set_failure(error);
        };
        if !std::mem::replace(&mut self.is_refused, true) {
            tracing::warn!(
                error = chain(error),
                kind = self.kind.name(),
                "cannot watch cluster network policies, retrying"
            );
        }
        self.is_complete = true;
    }

    fn set_failure(&mut self, error: &Error) {
        if !self.is_complete {
            set_failure(&mut self.failure, self.kind.plural(), error);
        }
    }

    /// Removes the policies that are not in the list. After that the policies are known.
    fn remove_unlisted(&mut self, listed: &HashSet<String>, model: &mut Model) {
        let absent = model.cluster_policies(self.kind).filter(|name| !listed.contains(*name)).cloned();
        for name in absent.collect::<Vec<_>>() {
            model.remove_cluster_policy(self.kind, &name);
        }
        self.reported.retain(|name, _| listed.contains(name));
        self.is_complete = true;
    }

    /// Adds or replaces a policy. An invalid policy has no effect; its problems are reported.
    fn put(&mut self, policy: &DynamicObject, recorder: &Recorder, model: &mut Model) {
        let name = policy.metadata.name.as_deref().unwrap_or_default();
        let problems = match ClusterPolicy::parse(self.kind, name, &policy.data["spec"]) {
            Ok(mut parsed) => {
                let problems = std::mem::take(&mut parsed.problems).join(". ");
                model.put_cluster_policy(parsed);
                problems
            }
            Err(error) => {
                model.remove_cluster_policy(self.kind, name);
                no_effect(&error)
            }
        };
        if problems.is_empty() {
            self.reported.remove(name);
            return;
        }
        let version = (policy.metadata.uid.clone(), policy.metadata.generation);
        if self.reported.insert(name.to_owned(), version.clone()).as_ref() == Some(&version) {
            return;
        }
        tracing::warn!(
            kind = self.kind.name(),
            policy = name,
            problems,
            "a cluster network policy is not enforced as written"
        );
        recorder.warning(reference(self.kind, policy), "PolicyNotEnforced", problems);
    }
}

fn no_effect(error: &InvalidPolicy) -> String {
    format!("the policy has no effect: {}", chain(error))
}

fn reference(kind: ClusterKind, policy: &DynamicObject) -> ObjectReference {
    ObjectReference {
        api_version: Some(format!("{}/{}", ClusterKind::GROUP, kind.version())),
        kind: Some(kind.name().to_owned()),
        name: policy.metadata.name.clone(),
        uid: policy.metadata.uid.clone(),
        resource_version: policy.metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}

fn definition(client: &Client, kind: ClusterKind) -> Events<Definition> {
    let name = format!("metadata.name={}.{}", kind.plural(), ClusterKind::GROUP);
    watch_with(Api::<Definition>::all(client.clone()), Config::default().fields(&name))
}

fn objects(client: &Client, kind: ClusterKind) -> Events<DynamicObject> {
    let named = GroupVersionKind::gvk(ClusterKind::GROUP, kind.version(), kind.name());
    let resource = ApiResource::from_gvk_with_plural(&named, kind.plural());
    watch_with(Api::<DynamicObject>::all_with(client.clone(), &resource), Config::default())
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::{Value, json};

    use super::*;
    use crate::client::silent;

    fn definition_of(kind: ClusterKind) -> Definition {
        let name = format!("{}.{}", kind.plural(), ClusterKind::GROUP);
        serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
    }

    fn policy(generation: i64, specification: Value) -> DynamicObject {
        serde_json::from_value(
            json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
            "metadata": {"name": "p", "uid": "u", "generation": generation}, "spec": specification}),
        )
        .unwrap()
    }

    fn refused(code: u16) -> Error {
        let status = Status::failure("refused", "Refused").with_code(code);
        Error::List(kube::Error::Api(Box::new(status)))
    }

    #[tokio::test]
    async fn policies_are_known_when_their_kind_is_absent_refused_or_listed() {
        let (client, mut model) = (silent(), Model::default());
        let (recorder, _sender) = crate::event_recorder::channel(client.clone(), "here");
        let new = || Kind::new(&client, ClusterKind::ClusterNetworkPolicy);
        let mut absent = new();
        absent.apply_definition_event(Ok(Event::Init), &client, &mut model);
        assert!(!absent.is_complete);
        absent.apply_definition_event(Ok(Event::InitDone), &client, &mut model);
        assert!(absent.is_complete && absent.objects.is_none(), "objects of an absent kind are not watched");
        let mut forbidden = new();
        let next_delay = |kind: &Kind| {
            let mut backoff = kind.refused_backoff;
            backoff.next_delay()
        };
        forbidden.apply_definition_event(Err(refused(500)), &client, &mut model);
        assert!(!forbidden.is_complete, "another request may succeed");
        forbidden.apply_definition_event(Err(refused(403)), &client, &mut model);
        assert!(forbidden.is_complete);
        assert_eq!(next_delay(&forbidden), FIRST_REFUSED_BACKOFF * 2);
        for _ in 0..20 {
            forbidden.apply_definition_event(Err(refused(403)), &client, &mut model);
        }
        assert_eq!(next_delay(&forbidden), MAX_REFUSED_BACKOFF);
        let definition = definition_of(forbidden.kind);
        forbidden.apply_definition_event(Ok(Event::Apply(definition)), &client, &mut model);
        assert_eq!(next_delay(&forbidden), FIRST_REFUSED_BACKOFF, "a later refusal is repeated soon");
        let mut defined = new();
        let definition = definition_of(defined.kind);
        for event in [Event::Init, Event::InitApply(definition.clone()), Event::InitDone] {
            defined.apply_definition_event(Ok(event), &client, &mut model);
        }
        assert!(!defined.is_complete && defined.objects.is_some());
        defined.apply_object_event(Err(refused(503)), &recorder, &mut model);
        assert!(!defined.is_complete, "unknown policies may exist");
        let failure = defined.failure.clone().unwrap();
        assert!(failure.starts_with("cannot list clusternetworkpolicies: "), "{failure}");
        defined.apply_object_event(Err(refused(404)), &recorder, &mut model);
        assert!(defined.is_complete && defined.is_refused, "it is not served yet");
        defined.apply_definition_event(Ok(Event::Apply(definition.clone())), &client, &mut model);
        assert!(!defined.is_refused, "the request is repeated");
        let specification = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}});
        for event in [Event::Init, Event::InitApply(policy(1, specification)), Event::InitDone] {
            defined.apply_object_event(Ok(event), &recorder, &mut model);
        }
        assert!(model.is_tiered() && defined.reported.is_empty());
        for code in [403, 404] {
            defined.apply_object_event(Err(refused(code)), &recorder, &mut model);
            assert!(model.is_tiered(), "known policies hold while they cannot be read: {code}");
        }
        defined.apply_definition_event(Ok(Event::Delete(definition)), &client, &mut model);
        assert!(!model.is_tiered() && defined.objects.is_none());
    }

    #[tokio::test]
    async fn an_invalid_policy_ends_the_former_one_and_is_reported_once() {
        let (client, mut model) = (silent(), Model::default());
        let (recorder, _sender) = crate::event_recorder::channel(client.clone(), "here");
        let mut kind = Kind::new(&client, ClusterKind::ClusterNetworkPolicy);
        let valid = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}});
        kind.put(&policy(1, valid.clone()), &recorder, &mut model);
        assert!(model.is_tiered());
        let invalid = policy(2, json!({"tier": "Middle", "priority": 1, "subject": {"namespaces": {}}}));
        kind.put(&invalid, &recorder, &mut model);
        assert!(!model.is_tiered());
        assert_eq!(kind.reported["p"], (Some("u".to_owned()), Some(2)));
        kind.put(&policy(3, valid), &recorder, &mut model);
        assert!(model.is_tiered() && kind.reported.is_empty());
    }
}
