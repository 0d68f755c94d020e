//! Who sums packets up: the device, or the kernel before it. And who had it so: where it is off for what tests found,
//! the device's alias says so, which `ip link` shows and which lives as long as the setting does.

#![expect(unsafe_code, reason = "a device's features are set by an ioctl with a pointer in it")]

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

use crate::route_socket::RouteSocket;

/// What sums up the packets that a device sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// The device, as it comes.
    On,
    /// The kernel: what devices sum up was found to be lost.
    OffByTest,
    /// The kernel: somebody wants it so.
    OffByOthers,
}

/// The alias of a device whose offload was found to do harm.
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

/// Has the device sum up what it sends, or not, for what a test found: `ethtool -K NAME tx on|off`.
pub(crate) fn set(name: &str, on: bool) -> io::Result<()> {
    let mut message = LinkMessage::default();
    let alias = if on { "" } else { BY_TEST };
    message.attributes =
        vec![LinkAttribute::IfName(name.to_owned()), LinkAttribute::IfAlias(alias.to_owned())];
    // Before it is off: else a start after a crash in between would take it for somebody's wish.
    let failed = RouteSocket::open()?.batch(vec![(RouteNetlinkMessage::SetLink(message), 0)])?;
    match failed.into_iter().next() {
        Some((_, error)) => Err(error),
        None => ask(name, SET_CHECKSUMS, on.into()).map(drop),
    }
}

/// Whether the device sums up what it sends, and if not, why.
pub(crate) fn get(name: &str) -> io::Result<Offload> {
    if ask(name, GET_CHECKSUMS, 0)? != 0 {
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

fn ask(name: &str, command: u32, data: u32) -> io::Result<u32> {
    let socket = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::1]:0"))?;
    let mut value = Value { command, data };
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: (&raw mut value).cast() },
    };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    // SAFETY: request and value are whole and live until the call returns; the kernel uses them in it alone.
    unsafe { ethtool(socket.as_raw_fd(), &raw mut request) }?;
    Ok(value.data)
}
