//! Horizontal pod autoscalers set the replicas of a workload according to metrics of its pods. Source: upstream's
//! `podautoscaler` controller.
//!
//! Every 15 seconds (`--horizontal-pod-autoscaler-sync-period`) `run` reads the target's scale, its pods and the
//! metrics. `replicas` proposes a number for each metric, and `behavior` limits the rate of change of the highest
//! proposal. Without autoscalers there are no reconciles.

pub(crate) mod behavior;
mod condition;
pub(crate) mod metrics;
pub(crate) mod plan;
pub(crate) mod pod;
pub(crate) mod replicas;
pub(crate) mod run;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_values::label_selector::LabelSelector;

use crate::object::Key;

/// The state of all autoscalers between reconciles.
#[derive(Debug, Default)]
pub(crate) struct State(Mutex<HashMap<Key, AutoscalerState>>);

/// The state of one autoscaler between reconciles.
#[derive(Clone, Debug, Default)]
struct AutoscalerState {
    history: behavior::History,
    /// The selector of the target's pods.
    selector: Option<LabelSelector>,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, AutoscalerState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
