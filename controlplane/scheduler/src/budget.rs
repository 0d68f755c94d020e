//! Disruption budgets, and the removals of pods that violate them.

use std::collections::HashMap;

use coracle_values::label_selector::LabelSelector;
use coracle_values::object::ObjectExt;

use crate::object::PodDisruptionBudget;
use crate::placed::Placed;

/// The budgets of all namespaces.
#[derive(Debug, Default)]
pub(crate) struct Budgets(HashMap<String, HashMap<String, Budget>>);

#[derive(Debug)]
struct Budget {
    selector: LabelSelector,
    allowed: i32,
    /// The names of pods whose eviction the budget has already counted.
    disrupted: Vec<String>,
}

impl Budgets {
    /// Adds a budget or its newer version. A budget whose selector is absent, empty or invalid selects no pods here, as
    /// upstream, and is not kept.
    pub(crate) fn set(&mut self, budget: &PodDisruptionBudget) {
        let selector = budget.spec.selector.as_ref().map(LabelSelector::try_from);
        let Some(Ok(selector)) =
            selector.filter(|selector| selector.as_ref().is_ok_and(|one| !one.is_empty()))
        else {
            return self.remove(budget);
        };
        let disrupted = budget.status.disrupted_pods.iter().flatten().map(|(name, _)| name.clone()).collect();
        let entry = Budget { selector, allowed: budget.status.disruptions_allowed, disrupted };
        let namespace = self.0.entry(budget.namespace().to_owned()).or_default();
        namespace.insert(budget.name().to_owned(), entry);
    }

    /// Removes a budget.
    pub(crate) fn remove(&mut self, budget: &PodDisruptionBudget) {
        if let Some(namespace) = self.0.get_mut(budget.namespace()) {
            namespace.remove(budget.name());
            if namespace.is_empty() {
                self.0.remove(budget.namespace());
            }
        }
    }

    /// Whether the removal of each pod violates a budget, after the removal of all earlier pods of the iterator.
    pub(crate) fn violations<'a>(&self, pods: impl Iterator<Item = &'a Placed>) -> Vec<bool> {
        let mut removed: HashMap<(&str, &str), i32> = HashMap::new();
        let mut violates = |placed: &Placed| {
            let mut violates = false;
            let Some((namespace, budgets)) = self.0.get_key_value(&placed.namespace) else { return false };
            for (name, budget) in budgets {
                if budget.disrupted.contains(&placed.name) || !budget.selector.matches(Some(&placed.labels)) {
                    continue;
                }
                let removed = removed.entry((namespace, name)).or_default();
                *removed += 1;
                violates |= *removed > budget.allowed;
            }
            violates
        };
        pods.map(&mut violates).collect()
    }
}
