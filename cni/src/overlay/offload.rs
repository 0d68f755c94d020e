//! Checksum offload of the overlay's device. The offload is switched off if a test finds that it loses packets. The
//! device's alias records the reason. `ip link` shows the alias, and the alias exists as long as the setting.

#![expect(unsafe_code, reason = "a device's features are set by an ioctl with a pointer in it")]

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

use crate::route_socket::{Request, RouteSocket};

/// Origin of the checksums of a device's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// The device computes the checksums. This is the default.
    On,
    /// The kernel computes the checksums: a test found that packets with the device's checksums are lost.
    OffByTest,
    /// The kernel computes the checksums: an administrator has set this.
    OffByOthers,
}

/// Alias of a device whose offload was found to lose packets.
const BY_TEST: &str = "coracle: checksum offload is off, for packets were lost with it";

/// `ETHTOOL_GTXCSUM`
const GET_CHECKSUMS: u32 = 0x16;
/// `ETHTOOL_STXCSUM`
const SET_CHECKSUMS: u32 = 0x17;

/// `struct ethtool_value`
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

nix::ioctl_readwrite_bad!(
    /// `SIOCETHTOOL`
    ethtool,
    0x8946,
    libc::ifreq
);

/// Switches the device's checksum offload on or off: `ethtool -K NAME tx on|off`.
pub(crate) fn set(name: &str, on: bool) -> io::Result<()> {
    let mut message = LinkMessage::default();
    let alias = if on { "" } else { BY_TEST };
    message.attributes =
        vec![LinkAttribute::IfName(name.to_owned()), LinkAttribute::IfAlias(alias.to_owned())];
    // The alias is set before the offload is switched off: after a crash in between, the next start would take the
    // setting for an administrator's.
    let refused = RouteSocket::open()?.batch(vec![Request::new(RouteNetlinkMessage::SetLink(message), 0)])?;
    match refused.into_iter().next() {
        Some(refused) => Err(refused.error),
        None => checksum_command(name, SET_CHECKSUMS, on.into()).map(drop),
    }
}

/// The device's checksum setting, and its origin.
pub(crate) fn get(name: &str) -> io::Result<Offload> {
    if checksum_command(name, GET_CHECKSUMS, 0)? != 0 {
        return Ok(Offload::On);
    }
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
    let found = RouteSocket::open()?.get(RouteNetlinkMessage::GetLink(message))?;
    let RouteNetlinkMessage::NewLink(link) = found else { return Ok(Offload::OffByOthers) };
    let is_mark =
        |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::IfAlias(is) if is == BY_TEST);
    Ok(if link.attributes.iter().any(is_mark) { Offload::OffByTest } else { Offload::OffByOthers })
}

fn checksum_command(name: &str, command: u32, data: u32) -> io::Result<u32> {
    let socket = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0"))?;
    let mut value = Value { command, data };
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: (&raw mut value).cast() },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // SAFETY: request and value live until the call returns, and the kernel uses them only during the call.
    unsafe { ethtool(socket.as_raw_fd(), &raw mut request) }?;
    Ok(value.data)
}
