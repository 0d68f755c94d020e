//! Types of settings, and how they are parsed from text.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use coracle_agent::{AllowedImages, AllowedSysctl, Threshold};
use coracle_images::PinPattern;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Taint;

use super::field::ValueKind;
use super::labels;

/// The type of a setting: a single value, an optional value, a list or a map.
pub(crate) trait Value: Sized {
    const VALUE_KIND: ValueKind;

    /// Parses the texts of one source. The error describes the expected form.
    fn parse(texts: &[String]) -> Result<Self, String>;

    /// The value if no source gives a value and there is no default.
    fn unset() -> Option<Self>;
}

/// A single value that is parsed from one text.
pub(crate) trait Single: Sized {
    const VALUE_KIND: ValueKind = ValueKind::Single;

    /// Parses the text. The error describes the expected form.
    fn parse(text: &str) -> Result<Self, String>;
}

/// A whole number from 0 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Percent(pub(crate) u8);

/// A finite number that is not negative, such as 0.1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fraction(pub(crate) f64);

/// A range of ports as kube-apiserver writes it: `30000-32767`, or `30000+2767`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortRange(pub(crate) RangeInclusive<u16>);

/// A certificate for server names: `CERT,KEY:NAME,NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SniCertKey {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    /// Server names. If the list is empty, the names in the certificate are used.
    pub(crate) names: Vec<String>,
}

/// A duration in the syntax of Go, as Kubernetes uses it: `2m`, `168h`, `0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GoDuration(pub(crate) Duration);

/// A duration, or a number of seconds. `None` for 0: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IdleTimeout(pub(crate) Option<Duration>);

/// A number, or `None` for -1: no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountOrAll(pub(crate) Option<usize>);

/// A number of bytes, or a quantity such as `10Mi`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteSize(pub(crate) u64);

/// A directory, file or socket. An empty text switches the feature off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PathOrOff(pub(crate) Option<PathBuf>);

/// A server of a stub domain: `corp.example=10.0.0.53`, or with a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StubServer(pub(crate) String, pub(crate) SocketAddr);

/// Amounts of resources by name: `cpu=500m,memory=1Gi`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Resources(pub(crate) BTreeMap<String, String>);

/// Eviction thresholds by signal: `memory.available<100Mi,nodefs.available<10%`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Thresholds(pub(crate) BTreeMap<String, Threshold>);

// === impl Value ===

impl<T: Single> Value for T {
    const VALUE_KIND: ValueKind = <T as Single>::VALUE_KIND;

    fn parse(texts: &[String]) -> Result<Self, String> {
        // The last text counts, as in the kubelet.
        texts.last().map_or_else(|| Err("a value is missing".to_owned()), |text| <T as Single>::parse(text))
    }

    fn unset() -> Option<Self> {
        None
    }
}

impl<T: Single> Value for Option<T> {
    const VALUE_KIND: ValueKind = <T as Single>::VALUE_KIND;

    fn parse(texts: &[String]) -> Result<Self, String> {
        <T as Value>::parse(texts).map(Some)
    }

    fn unset() -> Option<Self> {
        Some(None)
    }
}

impl<T: Single> Value for Vec<T> {
    const VALUE_KIND: ValueKind = ValueKind::List;

    fn parse(texts: &[String]) -> Result<Self, String> {
        texts.iter().map(|text| <T as Single>::parse(text)).collect()
    }

    fn unset() -> Option<Self> {
        Some(Vec::new())
    }
}

impl Value for Vec<SniCertKey> {
    const VALUE_KIND: ValueKind = ValueKind::Entries;

    fn parse(texts: &[String]) -> Result<Self, String> {
        texts.iter().map(|text| SniCertKey::parse(text)).collect()
    }

    fn unset() -> Option<Self> {
        Some(Vec::new())
    }
}

impl SniCertKey {
    fn parse(text: &str) -> Result<Self, String> {
        let (files, names) = text.split_once(':').unwrap_or((text, ""));
        let paths = files
            .split_once(',')
            .filter(|(certificate, key)| !certificate.is_empty() && !key.is_empty() && !key.contains(','));
        let (certificate, key) =
            paths.ok_or_else(|| format!("{text:?} is not CERT,KEY or CERT,KEY:NAMES"))?;
        let names =
            names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
        Ok(Self { certificate: certificate.into(), key: key.into(), names })
    }
}

impl Value for BTreeMap<String, String> {
    const VALUE_KIND: ValueKind = ValueKind::Map;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let pair = |text: &String| {
            let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not key=value"))?;
            Ok((key.trim().to_owned(), value.trim().to_owned()))
        };
        texts.iter().map(pair).collect()
    }

    fn unset() -> Option<Self> {
        Some(BTreeMap::new())
    }
}

impl Value for Resources {
    const VALUE_KIND: ValueKind = ValueKind::Map;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let amounts = <BTreeMap<String, String> as Value>::parse(texts)?;
        for (name, amount) in &amounts {
            // The kubelet's settings `systemReserved` and `kubeReserved` have only these resources.
            if !["cpu", "memory", "ephemeral-storage", "pid"].contains(&name.as_str()) {
                return Err(format!(
                    "{name:?} cannot be reserved; use cpu, memory, ephemeral-storage or pid"
                ));
            }
            if coracle_values::Quantity::parse(amount).map_or(true, |amount| amount.signum() < 0) {
                return Err(format!("{name}={amount} is not a quantity such as 500m or 1Gi"));
            }
        }
        Ok(Self(amounts))
    }

    fn unset() -> Option<Self> {
        Some(Self::default())
    }
}

impl Value for Option<Thresholds> {
    const VALUE_KIND: ValueKind = ValueKind::Map;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let threshold = |text: &String| {
            let (signal, value) = text
                .split_once(['<', '='])
                .ok_or_else(|| format!("{text:?} is not signal<value, such as memory.available<100Mi"))?;
            let value = Threshold::parse(value.trim())
                .ok_or_else(|| format!("{text:?} has neither a quantity nor a percentage"))?;
            Ok((signal.trim().to_owned(), value))
        };
        let thresholds = texts.iter().map(threshold).collect::<Result<BTreeMap<_, _>, String>>()?;
        Ok(Some(Thresholds(thresholds)))
    }

    fn unset() -> Option<Self> {
        Some(None)
    }
}

// === impl Single ===

impl Single for String {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

impl Single for PathBuf {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("a path is missing".to_owned()) } else { Ok(text.into()) }
    }
}

impl Single for PathOrOff {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(Some(PathBuf::from(text)).filter(|path| !path.as_os_str().is_empty())))
    }
}

impl Single for bool {
    const VALUE_KIND: ValueKind = ValueKind::Switch;

    fn parse(text: &str) -> Result<Self, String> {
        expect(text, "true or false")
    }
}

impl Single for IpAddr {
    fn parse(text: &str) -> Result<Self, String> {
        expect(text, "an IP address")
    }
}

impl Single for SocketAddr {
    fn parse(text: &str) -> Result<Self, String> {
        expect(text, "an IP address and a port, such as 127.0.0.1:80 or [::1]:80")
    }
}

impl Single for StubServer {
    fn parse(text: &str) -> Result<Self, String> {
        const DNS: u16 = 53;
        let expected = || "expected a domain and a server, such as corp.example=10.0.0.53".to_owned();
        let (domain, server) = text.split_once('=').ok_or_else(expected)?;
        let is_name = |label: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            (1..=63).contains(&label.len()) && label.bytes().all(is_plain)
        };
        let labels = domain.strip_suffix('.').unwrap_or(domain);
        if labels.len() > 253 || !labels.split('.').all(is_name) {
            return Err(expected());
        }
        let server = server.parse().or_else(|_| server.parse().map(|ip| SocketAddr::new(ip, DNS)));
        Ok(Self(labels.to_ascii_lowercase(), server.map_err(|_invalid| expected())?))
    }
}

impl Single for IpNetwork {
    fn parse(text: &str) -> Result<Self, String> {
        expect(text, "an IP range, such as 10.0.0.0/16")
    }
}

impl Single for PinPattern {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error| format!("{error}"))
    }
}

impl Single for AllowedImages {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }
}

impl Single for AllowedSysctl {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }
}

impl Single for Percent {
    fn parse(text: &str) -> Result<Self, String> {
        let expected = "a whole number from 0 to 100";
        expect::<u8>(text, expected).and_then(|value| match value {
            0..=100 => Ok(Self(value)),
            _ => Err(format!("expected {expected}")),
        })
    }
}

impl Single for Fraction {
    fn parse(text: &str) -> Result<Self, String> {
        let expected = "a number that is not negative, such as 0.1";
        let number: f64 = expect(text, expected)?;
        if number.is_finite() && number >= 0.0 {
            Ok(Self(number))
        } else {
            Err(format!("expected {expected}"))
        }
    }
}

impl Single for PortRange {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u16>().ok();
        let range = match text.split_once(['-', '+']) {
            Some((first, last)) if text.contains('-') => number(first).zip(number(last)),
            Some((first, more)) => {
                let first = number(first);
                first.zip(first.zip(number(more)).and_then(|(first, more)| first.checked_add(more)))
            }
            None => number(text).map(|port| (port, port)),
        };
        let range = range.filter(|(first, last)| *first > 0 && first <= last);
        let (first, last) =
            range.ok_or_else(|| "expected a range of ports, such as 30000-32767".to_owned())?;
        Ok(Self(first..=last))
    }
}

impl Single for GoDuration {
    fn parse(text: &str) -> Result<Self, String> {
        coracle_agent::duration(text)
            .map(Self)
            .ok_or_else(|| "expected a duration, such as 2m, 168h or 0".to_owned())
    }
}

impl Single for IdleTimeout {
    fn parse(text: &str) -> Result<Self, String> {
        let seconds = text.parse::<u32>().ok().map(|count| Duration::from_secs(count.into()));
        seconds
            .or_else(|| coracle_agent::duration(text))
            .map(|limit| Self(Some(limit).filter(|limit| !limit.is_zero())))
            .ok_or_else(|| "expected a duration, such as 4h, or a number of seconds".to_owned())
    }
}

impl Single for CountOrAll {
    fn parse(text: &str) -> Result<Self, String> {
        match text.parse::<i32>().map(usize::try_from) {
            Ok(Ok(count)) => Ok(Self(Some(count))),
            Ok(Err(_)) if text == "-1" => Ok(Self(None)),
            _ => Err("expected -1 or a larger whole number".to_owned()),
        }
    }
}

impl Single for ByteSize {
    fn parse(text: &str) -> Result<Self, String> {
        coracle_values::Quantity::parse(text)
            .ok()
            .map(coracle_values::Quantity::value)
            .and_then(|bytes| u64::try_from(bytes).ok())
            .map(Self)
            .ok_or_else(|| "expected a number of bytes or a quantity, such as 10Mi".to_owned())
    }
}

impl Single for Taint {
    /// `key=value:effect` or `key:effect`, as in the kubelet's `--register-with-taints`.
    fn parse(text: &str) -> Result<Self, String> {
        let expected = || "expected key=value:effect or key:effect".to_owned();
        let (name, effect) = text.rsplit_once(':').ok_or_else(expected)?;
        if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
            return Err(format!("{effect:?} is not NoSchedule, PreferNoSchedule or NoExecute"));
        }
        let (key, value) = match name.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned()).filter(|value| !value.is_empty())),
            None => (name, None),
        };
        if key.is_empty() {
            return Err(expected());
        }
        if !labels::is_key(key) {
            return Err(format!("{key:?} is not the key of a taint, such as example.com/gpu"));
        }
        if let Some(wrong) = value.as_deref().filter(|value| !labels::is_value(value)) {
            return Err(format!("{wrong:?} is not a value: at most 63 letters, digits, '-', '_' and '.'"));
        }
        Ok(Taint { key: key.to_owned(), value, effect: effect.to_owned(), time_added: None })
    }
}

macro_rules! whole_numbers {
    ($($type:ty),+) => {
        $(
            impl Single for $type {
                fn parse(text: &str) -> Result<Self, String> {
                    expect(text, &format!("a whole number from {} to {}", <$type>::MIN, <$type>::MAX))
                }
            }
        )+
    };
}
whole_numbers!(u8, u16, u32, i64, NonZero<u16>, NonZero<u32>);

/// Implements [`Single`] for an enumeration that implements clap's `ValueEnum`.
macro_rules! choices {
    ($($type:ty),+ $(,)?) => {
        $(
            impl $crate::settings::value::Single for $type {
                fn parse(text: &str) -> Result<Self, String> {
                    $crate::settings::value::choose(text)
                }
            }
        )+
    };
}
pub(crate) use choices;

/// Parses one of the values of an enumeration.
pub(crate) fn choose<T: ValueEnum>(text: &str) -> Result<T, String> {
    let value = T::value_variants()
        .iter()
        .find(|value| value.to_possible_value().is_some_and(|possible| possible.matches(text, false)));
    value.cloned().ok_or_else(|| {
        let names = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        format!(
            "expected one of {}",
            names.map(|value| value.get_name().to_owned()).collect::<Vec<_>>().join(", ")
        )
    })
}

fn expect<T: std::str::FromStr>(text: &str, expected: &str) -> Result<T, String> {
    // The parsers' own errors ("invalid digit found in string") do not name the expected form.
    text.parse().ok().ok_or_else(|| format!("expected {expected}"))
}
