//! The quality-of-service class of a pod, from its requests and limits of CPU and memory.

use std::fmt;

use crate::Quantity;

/// The quality-of-service class of a pod. Under pressure the node takes resources from the lower classes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum QosClass {
    /// The pod has no requests and no limits.
    BestEffort,
    /// The pod has requests or limits, but does not meet the rules of Guaranteed.
    Burstable,
    /// Every container has limits of CPU and memory, and requests equal to them.
    Guaranteed,
}

/// CPU and memory that one list (`requests` or `limits`) names. Other resources have no influence on the class.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuAndMemory {
    /// CPU.
    pub cpu: Option<Quantity>,
    /// Memory.
    pub memory: Option<Quantity>,
}

/// Requests and limits of one container, or of the pod as a whole.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestsAndLimits {
    /// The requests.
    pub requests: CpuAndMemory,
    /// The limits.
    pub limits: CpuAndMemory,
}

// === impl QosClass ===

impl QosClass {
    /// The name in `status.qosClass`.
    pub fn as_str(self) -> &'static str {
        match self {
            QosClass::BestEffort => "BestEffort",
            QosClass::Burstable => "Burstable",
            QosClass::Guaranteed => "Guaranteed",
        }
    }

    /// The class with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::BestEffort, Self::Burstable, Self::Guaranteed].into_iter().find(|class| class.as_str() == name)
    }

    /// The class of a pod. If the pod has pod-level resources, `parts` has only these. Otherwise `parts` has the
    /// resources of all containers and init containers. Ephemeral containers do not count.
    pub fn of(parts: impl IntoIterator<Item = RequestsAndLimits>) -> Self {
        let (mut requests, mut limits) = (CpuAndMemory::default(), CpuAndMemory::default());
        let mut all_limited = true;
        for part in parts {
            let limited = part.limits.positive();
            all_limited &= limited.cpu.is_some() && limited.memory.is_some();
            requests.add(part.requests.positive());
            limits.add(limited);
        }
        if requests.is_empty() && limits.is_empty() {
            QosClass::BestEffort
        } else if all_limited && requests.cpu == limits.cpu && requests.memory == limits.memory {
            QosClass::Guaranteed
        } else {
            QosClass::Burstable
        }
    }
}

impl fmt::Display for QosClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl CpuAndMemory ===

impl CpuAndMemory {
    /// Reads the two quantities of a list. An invalid quantity counts as absent. The API server refuses such
    /// quantities.
    pub fn read<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Self {
        let read = |name| get(name).and_then(|text| Quantity::parse(text).ok());
        Self { cpu: read("cpu"), memory: read("memory") }
    }

    /// The amounts above zero: upstream treats a zero amount as absent.
    fn positive(self) -> Self {
        let positive = |amount: Option<Quantity>| amount.filter(|amount| amount.signum() > 0);
        Self { cpu: positive(self.cpu), memory: positive(self.memory) }
    }

    fn add(&mut self, other: Self) {
        let sum = |own: Option<Quantity>, other: Option<Quantity>| match (own, other) {
            (Some(own), Some(other)) => Some(own.plus(other)),
            (own, other) => own.or(other),
        };
        *self = Self { cpu: sum(self.cpu, other.cpu), memory: sum(self.memory, other.memory) };
    }

    fn is_empty(&self) -> bool {
        self.cpu.is_none() && self.memory.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(cpu: &str, memory: &str) -> CpuAndMemory {
        CpuAndMemory::read(|name| Some(if name == "cpu" { cpu } else { memory }))
    }

    fn part(requests: CpuAndMemory, limits: CpuAndMemory) -> RequestsAndLimits {
        RequestsAndLimits { requests, limits }
    }

    #[test]
    fn the_class_follows_requests_and_limits() {
        let full = part(list("1", "1Gi"), list("1", "1Gi"));
        let respelled = part(list("1000m", "1024Mi"), list("1", "1Gi"));
        let half = part(list("500m", "1Gi"), list("1", "1Gi"));
        let zero = part(list("0", ""), list("", ""));
        let none = RequestsAndLimits::default();
        let cases = [
            (vec![full], QosClass::Guaranteed),
            (vec![respelled], QosClass::Guaranteed),
            (vec![full, none], QosClass::Burstable),
            (vec![half], QosClass::Burstable),
            (vec![none], QosClass::BestEffort),
            (vec![zero], QosClass::BestEffort),
            (vec![part(list("", ""), list("1", "1Gi"))], QosClass::Burstable),
            (vec![], QosClass::BestEffort),
        ];
        for (parts, expected) in cases {
            assert_eq!(QosClass::of(parts.clone()), expected, "for {parts:?}");
        }
        assert_eq!(QosClass::from_name(QosClass::Guaranteed.as_str()), Some(QosClass::Guaranteed));
        assert_eq!(QosClass::from_name("Other"), None);
    }
}
