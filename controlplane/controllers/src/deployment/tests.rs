//! Plans of deployments: single plans, and whole rollouts with a simulated replica set controller.

use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use super::condition::Conditions;
use super::plan::{Plan, Snapshot, plan};
use super::revision::{REVISION, REVISION_HISTORY, revision};
use super::rolling::{Bounds, size};
use crate::object::{Deployment, ObjectExt, ReplicaSet};
use crate::template::{HASH_LABEL, Template};

/// A deployment with its sets, and the time.
struct World {
    deployment: Deployment,
    sets: Vec<ReplicaSet>,
    now: Timestamp,
    serial: i64,
}

fn template(image: &str) -> Template {
    Template::new(
        &json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "image": image}]}}),
    )
}

impl World {
    fn new(spec: Value) -> Self {
        let mut value = json!({
            "metadata": {"name": "web", "namespace": "d", "uid": "web", "generation": 1,
                         "annotations": {"note": "x", "kubectl.kubernetes.io/last-applied-configuration": "{}"}},
            "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "a"}}, "progressDeadlineSeconds": 600,
                     "revisionHistoryLimit": 10},
        });
        for (name, field) in spec.as_object().unwrap() {
            value["spec"][name] = field.clone();
        }
        let mut deployment: Deployment = serde_json::from_value(value).unwrap();
        deployment.spec.template = template("v1");
        Self { deployment, sets: Vec::new(), now: "2026-01-01T12:00:00Z".parse().unwrap(), serial: 0 }
    }

    fn decide(&self) -> Plan {
        let selector = LabelSelector::try_from(&self.deployment.spec.selector).unwrap();
        let running = self.sets.iter().filter(|set| set.status.replicas > 0).map(|set| set.uid().to_owned());
        plan(Snapshot {
            deployment: &self.deployment,
            selector: &selector,
            sets: self.sets.iter().cloned().map(Arc::new).collect(),
            running: running.collect(),
            now: self.now,
        })
    }

    /// Applies the plan as the API server would. Returns whether a set changed.
    fn apply(&mut self, plan: Plan) -> bool {
        let mut acted = false;
        if let Some(new) = plan.create {
            acted = true;
            self.serial += 1;
            let mut set = ReplicaSet::default();
            set.metadata.name = Some(format!("web-{}", new.hash));
            set.metadata.namespace = Some("d".into());
            set.metadata.uid = Some(format!("set-{}", self.serial));
            set.metadata.generation = Some(1);
            set.metadata.creation_timestamp = Some(Time(self.now));
            set.metadata.labels = Some([("app".into(), "a".into()), (HASH_LABEL.into(), new.hash)].into());
            set.metadata.annotations = Some(new.annotations);
            set.metadata.owner_references = Some(vec![self.deployment.controller_reference()]);
            set.spec.replicas = Some(new.replicas);
            set.spec.template = self.deployment.spec.template.clone();
            self.sets.push(set);
        }
        for update in plan.update {
            acted = true;
            let set = self.sets.iter_mut().find(|set| set.uid() == update.set.uid()).unwrap();
            set.spec.replicas = update.replicas.or(set.spec.replicas);
            set.metadata.annotations.get_or_insert_default().extend(update.annotations);
        }
        for gone in plan.delete {
            acted = true;
            self.sets.retain(|set| set.uid() != gone.uid());
        }
        if let Some(revision) = plan.revision {
            self.deployment.metadata.annotations.get_or_insert_default().insert(REVISION.into(), revision);
        }
        if let Some(status) = plan.status {
            self.deployment.status = status;
        }
        acted
    }

    /// Creates or deletes one pod; sets with too many pods come first.
    fn one_pod(&mut self) -> bool {
        for set in &mut self.sets {
            set.status.observed_generation = set.metadata.generation;
            let desired = set.spec.replicas.unwrap();
            if set.status.replicas != desired {
                set.status.replicas += (desired - set.status.replicas).signum();
                let ready = set.status.ready_replicas.unwrap_or_default().min(set.status.replicas);
                set.status.ready_replicas = Some(ready);
                set.status.available_replicas = Some(ready);
                return true;
            }
        }
        for set in &mut self.sets {
            if set.status.ready_replicas.unwrap_or_default() < set.status.replicas {
                set.status.ready_replicas = Some(set.status.ready_replicas.unwrap_or_default() + 1);
                set.status.available_replicas = set.status.ready_replicas;
                return true;
            }
        }
        false
    }

    /// Runs until nothing changes any more. Calls `check` after each step.
    fn run_until_stable(&mut self, mut check: impl FnMut(&Self)) {
        for _ in 0..500 {
            self.now += SignedDuration::from_secs(1);
            let plan = self.decide();
            let acted = self.apply(plan);
            check(self);
            let moved = self.one_pod();
            check(self);
            if !acted && !moved && self.decide().status.is_none() {
                return;
            }
        }
        panic!("the rollout does not become stable");
    }

    fn roll_to(&mut self, image: &str) {
        self.deployment.spec.template = template(image);
        self.deployment.metadata.generation =
            self.deployment.metadata.generation.map(|generation| generation + 1);
    }

    fn scale_to(&mut self, replicas: i32) {
        self.deployment.spec.replicas = Some(replicas);
        self.deployment.metadata.generation =
            self.deployment.metadata.generation.map(|generation| generation + 1);
    }

    fn sizes(&self) -> Vec<i32> {
        self.sets.iter().map(size).collect()
    }

    fn reason(&self, type_: &str) -> String {
        let conditions = Conditions(self.deployment.status.conditions.clone().unwrap_or_default());
        conditions.reason(type_).unwrap_or("none").to_owned()
    }
}

#[test]
fn a_new_deployment_makes_its_set_at_full_size_and_completes() {
    let mut world = World::new(json!({}));
    let plan = world.decide();
    let new = plan.create.as_ref().unwrap();
    assert_eq!(new.replicas, 3);
    assert_eq!(new.annotations.get("note").map(String::as_str), Some("x"));
    assert_eq!(new.annotations.get(REVISION).map(String::as_str), Some("1"));
    assert_eq!(new.annotations.get(super::revision::MAX_REPLICAS).map(String::as_str), Some("4"));
    assert!(!new.annotations.contains_key("kubectl.kubernetes.io/last-applied-configuration"));
    world.run_until_stable(|_| {});
    let status = &world.deployment.status;
    assert_eq!(
        (status.replicas, status.updated_replicas, status.available_replicas),
        (Some(3), Some(3), Some(3))
    );
    assert_eq!(status.observed_generation, Some(1));
    assert_eq!(world.reason("Available"), "MinimumReplicasAvailable");
    assert_eq!(world.reason("Progressing"), "NewReplicaSetAvailable");
}

#[test]
fn a_change_of_max_surge_alone_writes_to_no_set() {
    let mut world = World::new(json!({}));
    world.run_until_stable(|_| {});
    let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 1}});
    world.deployment.spec.strategy = serde_json::from_value(strategy).unwrap();
    assert!(world.decide().update.is_empty());
    world.deployment.spec.paused = Some(true);
    assert!(world.decide().update.is_empty(), "also while the deployment is paused");
    world.deployment.spec.paused = None;
    // The next change of the size also writes the annotation.
    world.scale_to(4);
    world.run_until_stable(|_| {});
    assert_eq!(world.sets[0].annotation(super::revision::MAX_REPLICAS), Some("6"));
}

#[test]
fn a_rolling_update_never_leaves_its_bounds() {
    for (replicas, surge, unavailable) in [
        (3, json!("25%"), json!("25%")),
        (10, json!(3), json!(2)),
        (4, json!(0), json!(1)),
        (1, json!(0), json!(0)),
    ] {
        let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}});
        let mut world = World::new(json!({"replicas": replicas, "strategy": strategy}));
        world.run_until_stable(|_| {});
        world.roll_to("v2");
        let bounds = Bounds::of(&world.deployment);
        world.run_until_stable(|world| {
            let total: i32 = world.sizes().iter().sum();
            let available: i32 = world.sets.iter().filter_map(|set| set.status.available_replicas).sum();
            assert!(total <= bounds.most(), "{total} pods of at most {}", bounds.most());
            assert!(available >= bounds.fewest(), "{available} available of at least {}", bounds.fewest());
        });
        assert_eq!(world.sizes(), [0, replicas]);
        assert_eq!(world.deployment.annotation(REVISION), Some("2"));
    }
}

#[test]
fn a_rollback_reuses_the_old_set_under_a_new_revision() {
    let mut world = World::new(json!({}));
    world.run_until_stable(|_| {});
    world.roll_to("v2");
    world.run_until_stable(|_| {});
    world.roll_to("v1");
    world.run_until_stable(|_| {});
    assert_eq!(world.sizes(), [3, 0]);
    assert_eq!(revision(&world.sets[0]), 3);
    assert_eq!(world.sets[0].annotation(REVISION_HISTORY), Some("1"));
    assert_eq!(world.deployment.annotation(REVISION), Some("3"));
}

#[test]
fn recreate_waits_for_the_end_of_the_last_old_pod() {
    let mut world = World::new(json!({"strategy": {"type": "Recreate"}}));
    world.run_until_stable(|_| {});
    world.roll_to("v2");
    world.run_until_stable(|world| {
        let pods: Vec<i32> = world.sets.iter().map(|set| set.status.replicas).collect();
        assert!(pods[0] == 0 || world.sets.len() == 1, "{pods:?}");
    });
    assert_eq!(world.sizes(), [0, 3]);
}

#[test]
fn a_change_of_size_in_mid_update_is_shared_in_proportion() {
    let strategy = json!({"rollingUpdate": {"maxSurge": 3, "maxUnavailable": 2}});
    let mut world = World::new(json!({"replicas": 10, "strategy": strategy}));
    world.run_until_stable(|_| {});
    world.roll_to("v2");
    // The new set grows to 5 pods that never become ready; the old one stays at 8.
    for _ in 0..3 {
        let plan = world.decide();
        world.apply(plan);
        world.sets[0].status.replicas = size(&world.sets[0]);
        world.sets[0].status.available_replicas = Some(size(&world.sets[0]));
        if let Some(new) = world.sets.get_mut(1) {
            new.status.replicas = size(new);
        }
    }
    assert_eq!(world.sizes(), [8, 5]);
    world.scale_to(15);
    let plan = world.decide();
    world.apply(plan);
    assert_eq!(world.sizes(), [11, 7]);
}

#[test]
fn a_paused_deployment_scales_but_does_not_roll() {
    let mut world = World::new(json!({}));
    world.run_until_stable(|_| {});
    world.deployment.spec.paused = Some(true);
    world.roll_to("v2");
    world.scale_to(5);
    world.run_until_stable(|_| {});
    assert_eq!(world.sizes(), [5]);
    assert_eq!(world.reason("Progressing"), "DeploymentPaused");
    world.deployment.spec.paused = None;
    world.run_until_stable(|_| {});
    assert_eq!(world.sizes(), [0, 5]);
    assert_eq!(world.reason("Progressing"), "NewReplicaSetAvailable");
}

#[test]
fn old_sets_beyond_the_limit_go_when_the_rollout_is_over() {
    let mut world = World::new(json!({"revisionHistoryLimit": 1}));
    for image in ["v1", "v2", "v3", "v4"] {
        world.roll_to(image);
        world.run_until_stable(|_| {});
    }
    let revisions: Vec<i64> = world.sets.iter().map(revision).collect();
    assert_eq!(revisions, [3, 4]);
}

#[test]
fn a_rollout_without_progress_misses_its_deadline() {
    let mut world = World::new(json!({"progressDeadlineSeconds": 60}));
    let plan = world.decide();
    world.apply(plan);
    world.sets[0].status.replicas = 3;
    world.now += SignedDuration::from_secs(1);
    let plan = world.decide();
    assert_eq!(plan.again.map(|wait| wait.as_secs()), Some(61));
    world.apply(plan);
    assert_eq!(world.reason("Progressing"), "ReplicaSetUpdated");
    world.now += SignedDuration::from_secs(62);
    let plan = world.decide();
    assert!(plan.again.is_none());
    world.apply(plan);
    assert_eq!(world.reason("Progressing"), "ProgressDeadlineExceeded");
    assert_eq!(world.reason("Available"), "MinimumReplicasUnavailable");
}

#[test]
fn matching_orphans_are_adopted_and_other_sets_are_released() {
    let mut world = World::new(json!({}));
    world.run_until_stable(|_| {});
    world.sets[0].metadata.owner_references = None;
    assert_eq!(world.decide().adopt.len(), 1);
    world.sets[0].metadata.owner_references = Some(vec![world.deployment.controller_reference()]);
    world.sets[0].metadata.labels = None;
    assert_eq!(world.decide().release.len(), 1);
}

#[test]
fn a_complete_deployment_needs_no_action() {
    let mut world = World::new(json!({}));
    world.run_until_stable(|_| {});
    let plan = world.decide();
    assert!(
        plan.create.is_none() && plan.update.is_empty() && plan.status.is_none() && plan.revision.is_none()
    );
}

#[test]
fn pods_that_are_being_deleted_are_summed_if_every_set_counts_them() {
    let mut world = World::new(json!({}));
    world.run_until_stable(|_| {});
    world.roll_to("v2");
    world.run_until_stable(|_| {});
    let status = |world: &World| world.decide().status.map(|status| status.terminating_replicas);
    assert_eq!(world.deployment.status.terminating_replicas, None);
    world.sets[0].status.terminating_replicas = Some(2);
    assert_eq!(status(&world), None, "the status is still the same: one set does not say");
    world.sets[1].status.terminating_replicas = Some(0);
    assert_eq!(status(&world), Some(Some(2)));
}
