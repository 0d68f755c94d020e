//! A member of the chain, with the durations of its calls.

use std::{sync::OnceLock, time::Instant};

use prometheus::Histogram;
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation};
use crate::{error::Result, metrics::Step};

/// The steps that a member implements. The chain calls the member in these steps only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steps {
    Mutate,
    Validate,
    Both,
}

/// A plugin, or a part of a plugin.
pub(crate) struct Member {
    /// Name of the plugin. Empty for the rules of a kind: these rules are not a plugin, so the metrics do not count
    /// them.
    name: &'static str,
    steps: Steps,
    pub(super) plugin: Box<dyn Admit>,
    durations: Durations,
}

/// Durations by step, operation and whether the object was refused. A histogram is created at its first use, so that
/// the metrics do not have series for combinations that never occurred.
#[derive(Default)]
struct Durations([[[OnceLock<Histogram>; 2]; 4]; 2]);

/// A call of a plugin whose duration is recorded.
struct TimedCall {
    step: Step,
    operation: Operation,
    began: Instant,
}

// === impl Member ===

impl Member {
    pub(super) fn new(name: &'static str, steps: Steps, plugin: Box<dyn Admit>) -> Self {
        Self { name, steps, plugin, durations: Durations::default() }
    }

    /// Changes an object.
    pub(super) async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !self.implements(Steps::Mutate) {
            return Ok(());
        }
        let call = self.is_counted().then(|| TimedCall::begin(Step::Admit, attributes));
        let result = self.plugin.mutate(admission, attributes, object).await;
        if let Some(call) = call {
            self.count(&call, admission, result.is_err());
        }
        result
    }

    /// Accepts or refuses an object.
    pub(super) async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if !self.implements(Steps::Validate) {
            return Ok(());
        }
        let call = self.is_counted().then(|| TimedCall::begin(Step::Validate, attributes));
        let result = self.plugin.validate(admission, attributes, object).await;
        if let Some(call) = call {
            self.count(&call, admission, result.is_err());
        }
        result
    }

    /// Whether the member implements this step. Calls of the other steps are omitted, because each call allocates a
    /// future.
    fn implements(&self, step: Steps) -> bool {
        self.steps == step || self.steps == Steps::Both
    }

    /// Whether the calls are counted.
    fn is_counted(&self) -> bool {
        !self.name.is_empty()
    }

    /// Records the duration of a call that ends now.
    fn count(&self, call: &TimedCall, admission: &Admission, rejected: bool) {
        let TimedCall { step, operation, began } = *call;
        let durations = &self.durations.0[step as usize][operation as usize][usize::from(rejected)];
        let create =
            || admission.metrics.admission.plugin_durations(self.name, step, operation.name(), rejected);
        durations.get_or_init(create).observe(began.elapsed().as_secs_f64());
    }
}

// === impl TimedCall ===

impl TimedCall {
    fn begin(step: Step, attributes: &Attributes<'_>) -> Self {
        Self { step, operation: attributes.operation, began: Instant::now() }
    }
}
