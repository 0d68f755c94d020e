//! A member of the chain, with the durations of its calls.

use std::{sync::OnceLock, time::Instant};

use prometheus::Histogram;
use serde_json::Value;

use super::{Admission, Admit, Attributes};
use crate::{error::Result, metrics::Step};

/// The steps that a member implements. Its calls in another step do nothing and are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steps {
    Mutate,
    Validate,
    Both,
}

/// A plugin, or a part of one.
pub(crate) struct Member {
    /// Empty for the rules of a kind, which are no plugin. These are not counted.
    name: &'static str,
    steps: Steps,
    pub(super) plugin: Box<dyn Admit>,
    durations: Durations,
}

/// Durations by step, operation and whether the object was refused. Each is created at its first use, so that the metrics
/// show none that cannot occur.
#[derive(Default)]
struct Durations([[[OnceLock<Histogram>; 2]; 4]; 2]);

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
        let began = self.counts(Steps::Mutate).then(Instant::now);
        let result = self.plugin.mutate(admission, attributes, object).await;
        if let Some(began) = began {
            self.count(Step::Admit, (admission, attributes), result.is_err(), began);
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
        let began = self.counts(Steps::Validate).then(Instant::now);
        let result = self.plugin.validate(admission, attributes, object).await;
        if let Some(began) = began {
            self.count(Step::Validate, (admission, attributes), result.is_err(), began);
        }
        result
    }

    /// Whether calls in this step are counted.
    fn counts(&self, step: Steps) -> bool {
        !self.name.is_empty() && (self.steps == step || self.steps == Steps::Both)
    }

    fn count(
        &self,
        step: Step,
        (admission, attributes): (&Admission, &Attributes<'_>),
        rejected: bool,
        began: Instant,
    ) {
        let operation = attributes.operation;
        let durations = &self.durations.0[step as usize][operation as usize][usize::from(rejected)];
        let create =
            || admission.metrics.admission.plugin_durations(self.name, (step, operation.name()), rejected);
        durations.get_or_init(create).observe(began.elapsed().as_secs_f64());
    }
}
