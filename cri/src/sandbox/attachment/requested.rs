//! IP addresses and MAC address that a pod requests by annotations: the CRI has no fields for them. They become the
//! capabilities `ips` and `mac` of the CNI conventions.

use std::collections::HashMap;
use std::net::IpAddr;

use serde_json::{Value, json};

use crate::error::Error;

/// One or several IP addresses, comma-separated, each optionally with the prefix length of its network.
const IPS: &str = "cni.coracle/ips";
/// MAC address: six bytes, `0a:58:0a:2a:00:07`.
const MAC: &str = "cni.coracle/mac";

/// The requested capabilities.
pub(super) fn capabilities(
    annotations: &HashMap<String, String>,
) -> Result<impl Iterator<Item = (String, Value)> + use<>, Error> {
    let ips = annotations.get(IPS).map(|text| ips(text)).transpose()?;
    let mac = annotations.get(MAC).map(|text| mac(text)).transpose()?;
    let ips = ips.map(|ips| ("ips".to_owned(), json!(ips)));
    Ok(ips.into_iter().chain(mac.map(|mac| ("mac".to_owned(), json!(mac)))))
}

/// Refuses requested addresses of a pod without its own network.
pub(crate) fn refuse(annotations: &HashMap<String, String>) -> Result<(), Error> {
    match [IPS, MAC].into_iter().find(|name| annotations.contains_key(*name)) {
        Some(name) => Err(wrong(name, "a pod in the node's network has no own addresses")),
        None => Ok(()),
    }
}

fn ips(text: &str) -> Result<Vec<String>, Error> {
    let mut ips: Vec<(IpAddr, String)> = Vec::new();
    for one in text.split(',').map(str::trim) {
        let (host, prefix) = one.split_once('/').map_or((one, None), |(host, prefix)| (host, Some(prefix)));
        let ip: IpAddr = host.parse().map_err(|_not| wrong(IPS, format!("{one:?} is not an IP address")))?;
        let width = if ip.is_ipv4() { 32 } else { 128 };
        if prefix.is_some_and(|prefix| prefix.parse::<u8>().map_or(true, |prefix| prefix > width)) {
            return Err(wrong(IPS, format!("{one:?} has an invalid prefix length")));
        }
        if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast(ip) {
            return Err(wrong(IPS, format!("{one} is not the address of a host")));
        }
        if ips.iter().any(|(other, _)| *other == ip) {
            return Err(wrong(IPS, format!("{ip} is listed twice")));
        }
        ips.push((ip, prefix.map_or_else(|| ip.to_string(), |prefix| format!("{ip}/{prefix}"))));
    }
    Ok(ips.into_iter().map(|(_, text)| text).collect())
}

fn is_broadcast(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V4(v4) if v4.is_broadcast())
}

/// Parses a MAC address. The result has the kernel's notation.
fn mac(text: &str) -> Result<String, Error> {
    let is_byte = |part: &str| part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |part: &str| u8::from_str_radix(part, 16).ok().filter(|_| is_byte(part));
    let bytes: Option<Vec<u8>> = text.trim().split([':', '-']).map(byte).collect();
    let bytes = bytes.filter(|bytes| bytes.len() == 6);
    let bytes = bytes.ok_or_else(|| wrong(MAC, format!("{text:?} is not a MAC address")))?;
    if bytes[0] & 1 == 1 {
        return Err(wrong(MAC, format!("{text} is a multicast address")));
    }
    if bytes.iter().all(|byte| *byte == 0) {
        return Err(wrong(MAC, format!("{text} is the zero address")));
    }
    let parts: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(parts.join(":"))
}

fn wrong(name: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid("annotations", format!("{name}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(name: &str, text: &str) -> Result<Value, String> {
        let found = capabilities(&HashMap::from([(name.to_owned(), text.to_owned())]));
        found.map(|mut found| found.next().unwrap().1).map_err(|error| error.to_string())
    }

    #[test]
    fn addresses_follow_the_cni_conventions() {
        for (text, expected) in [
            ("10.42.0.7", json!(["10.42.0.7"])),
            (" 10.42.0.7/24, fd42::7/64", json!(["10.42.0.7/24", "fd42::7/64"])),
            ("FD42:0::7", json!(["fd42::7"])),
        ] {
            assert_eq!(requested(IPS, text), Ok(expected), "{text}");
        }
        assert_eq!(requested(MAC, "0A-58-0a-2a-00-07"), Ok(json!("0a:58:0a:2a:00:07")));
        assert_eq!(capabilities(&HashMap::new()).unwrap().count(), 0);
    }

    #[test]
    fn errors_name_the_annotation() {
        for (name, text, message) in [
            (IPS, "", "\"\" is not an IP address"),
            (IPS, "10.42.0.7,", "\"\" is not an IP address"),
            (IPS, "10.42.0", "\"10.42.0\" is not an IP address"),
            (IPS, "[\"10.42.0.7\"]", "is not an IP address"),
            (IPS, "10.42.0.7/33", "prefix"),
            (IPS, "fd42::7/129", "prefix"),
            (IPS, "10.42.0.7/", "prefix"),
            (IPS, "0.0.0.0", "not the address of a host"),
            (IPS, "255.255.255.255", "not the address of a host"),
            (IPS, "224.0.0.1", "not the address of a host"),
            (IPS, "ff02::1", "not the address of a host"),
            (IPS, "::1", "not the address of a host"),
            (IPS, "fd42::7,fd42:0::7/64", "listed twice"),
            (MAC, "", "not a MAC address"),
            (MAC, "0a:58:0a:2a:00", "not a MAC address"),
            (MAC, "0a:58:0a:2a:00:07:08", "not a MAC address"),
            (MAC, "0a:58:0a:2a:0:7", "not a MAC address"),
            (MAC, "0a580a2a0007", "not a MAC address"),
            (MAC, "0a:58:0a:2a:00:+7", "not a MAC address"),
            (MAC, "01:58:0a:2a:00:07", "a multicast address"),
            (MAC, "ff:ff:ff:ff:ff:ff", "a multicast address"),
            (MAC, "00:00:00:00:00:00", "the zero address"),
        ] {
            let error = requested(name, text).unwrap_err();
            assert!(
                error.starts_with(&format!("annotations: {name}: ")) && error.contains(message),
                "{error}"
            );
        }
    }
}
