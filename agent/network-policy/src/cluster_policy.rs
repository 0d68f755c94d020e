//! Policies of the whole cluster (group `policy.networking.k8s.io`), parsed.
//!
//! A rule with a peer or port that cannot be parsed fails closed, as the API requires. An `Allow` rule matches
//! nothing, any other rule denies everything.

mod rule;

use std::fmt;

use coracle_values::label_selector::LabelSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector as Selector;
use serde::Deserialize;
use serde_json::Value;

use crate::rules::{Direction, Namespaces, PodPeer, Rule, Rules, Tier};

/// Priority of a BaselineAdminNetworkPolicy, which has no priority field. It follows all ClusterNetworkPolicies of its
/// tier.
const LAST: u16 = 1001;

/// Kinds of policies of the whole cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClusterKind {
    /// `v1alpha2`: replaces the two other kinds.
    ClusterNetworkPolicy,
    /// `v1alpha1`.
    AdminNetworkPolicy,
    /// `v1alpha1`.
    BaselineAdminNetworkPolicy,
}

/// A parsed policy of the whole cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterPolicy {
    pub(crate) kind: ClusterKind,
    pub(crate) name: String,
    pub(crate) rank: Rank,
    pub(crate) rules: Rules,
    /// Descriptions of the parts that have no effect, or an effect other than the intended one.
    pub problems: Vec<String>,
}

/// Place of a policy in the order of evaluation. Policies of equal priority are ordered by kind and name, so that all
/// nodes decide alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) tier: Tier,
    pub(crate) priority: u16,
    pub(crate) kind: ClusterKind,
    pub(crate) name: String,
}

/// The reason why a policy has no effect.
#[derive(Debug, thiserror::Error)]
pub enum InvalidPolicy {
    /// The specification does not have the schema of the API.
    #[error("cannot parse the specification")]
    Specification(#[source] serde_json::Error),
    /// The tier is unknown.
    #[error("unknown tier {0}, expected Admin or Baseline")]
    Tier(String),
    /// The priority is absent or too large.
    #[error("the priority must be from 0 to 1000")]
    Priority,
    /// The selector of the subject cannot be parsed.
    #[error("invalid selector of the subject: {0}")]
    Subject(String),
}

#[derive(Deserialize)]
struct Specification {
    tier: Option<String>,
    priority: Option<u16>,
    subject: Subject,
    #[serde(default)]
    ingress: Vec<Value>,
    #[serde(default)]
    egress: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Subject {
    Namespaces(Selector),
    Pods(NamespacedPods),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NamespacedPods {
    #[serde(default)]
    namespace_selector: Selector,
    #[serde(default)]
    pod_selector: Selector,
}

// === impl ClusterKind ===

impl ClusterKind {
    /// All kinds.
    pub const ALL: [Self; 3] =
        [Self::ClusterNetworkPolicy, Self::AdminNetworkPolicy, Self::BaselineAdminNetworkPolicy];
    /// API group of the kinds.
    pub const GROUP: &str = "policy.networking.k8s.io";

    /// Version of the API whose objects are read.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::ClusterNetworkPolicy => "v1alpha2",
            Self::AdminNetworkPolicy | Self::BaselineAdminNetworkPolicy => "v1alpha1",
        }
    }

    /// Name of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ClusterNetworkPolicy => "ClusterNetworkPolicy",
            Self::AdminNetworkPolicy => "AdminNetworkPolicy",
            Self::BaselineAdminNetworkPolicy => "BaselineAdminNetworkPolicy",
        }
    }

    /// Name of the resource.
    #[must_use]
    pub fn plural(self) -> &'static str {
        match self {
            Self::ClusterNetworkPolicy => "clusternetworkpolicies",
            Self::AdminNetworkPolicy => "adminnetworkpolicies",
            Self::BaselineAdminNetworkPolicy => "baselineadminnetworkpolicies",
        }
    }

    fn tier_and_priority(self, specification: &Specification) -> Result<(Tier, u16), InvalidPolicy> {
        let tier = match (self, specification.tier.as_deref()) {
            (Self::AdminNetworkPolicy, _) | (Self::ClusterNetworkPolicy, Some("Admin")) => Tier::Admin,
            (Self::BaselineAdminNetworkPolicy, _) => return Ok((Tier::Baseline, LAST)),
            (Self::ClusterNetworkPolicy, Some("Baseline")) => Tier::Baseline,
            (Self::ClusterNetworkPolicy, other) => {
                return Err(InvalidPolicy::Tier(other.unwrap_or("(none)").to_owned()));
            }
        };
        let priority = specification.priority.filter(|priority| *priority < LAST);
        Ok((tier, priority.ok_or(InvalidPolicy::Priority)?))
    }
}

impl fmt::Display for ClusterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

// === impl ClusterPolicy ===

impl ClusterPolicy {
    /// Parses the specification of a policy.
    ///
    /// # Errors
    /// When the subject, the tier or the priority of the policy is invalid.
    pub fn parse(kind: ClusterKind, name: &str, specification: &Value) -> Result<Self, InvalidPolicy> {
        let parsed = Specification::deserialize(specification).map_err(InvalidPolicy::Specification)?;
        let (tier, priority) = kind.tier_and_priority(&parsed)?;
        let subject = match &parsed.subject {
            Subject::Namespaces(selector) => pods_of(selector, &Selector::default()),
            Subject::Pods(pods) => pods_of(&pods.namespace_selector, &pods.pod_selector),
        };
        let mut problems = Vec::new();
        let ingress = rules_of(&parsed.ingress, Direction::Ingress, &mut problems);
        let egress = rules_of(&parsed.egress, Direction::Egress, &mut problems);
        let rules = Rules { subject: subject.map_err(InvalidPolicy::Subject)?, ingress, egress };
        let rank = Rank { tier, priority, kind, name: name.to_owned() };
        Ok(Self { kind, name: name.to_owned(), rank, rules, problems })
    }
}

/// The rules of a direction. `None` without rules: the policy does not affect the direction.
fn rules_of(all: &[Value], direction: Direction, problems: &mut Vec<String>) -> Option<Vec<Rule>> {
    let parsed = all.iter().enumerate().filter_map(|(position, value)| {
        let parsed = rule::parse(value, direction);
        let name = value["name"].as_str().map(|name| format!(" ({name})")).unwrap_or_default();
        let of = if direction == Direction::Ingress { "ingress" } else { "egress" };
        let problem = |problem| format!("{of} rule {position}{name}: {problem}");
        problems.extend(parsed.problems.into_iter().map(problem));
        parsed.rule
    });
    let rules: Vec<Rule> = parsed.collect();
    (!all.is_empty()).then_some(rules)
}

/// The pods that both selectors select, or why a selector is invalid.
fn pods_of(namespaces: &Selector, pods: &Selector) -> Result<PodPeer, String> {
    let parse = |selector: &Selector| LabelSelector::try_from(selector).map_err(|error| error.to_string());
    Ok(PodPeer { namespaces: Namespaces::Selected(parse(namespaces)?), pods: parse(pods)? })
}

#[cfg(test)]
mod tests;
