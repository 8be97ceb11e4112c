"""Booking: a trip is a hotel and a flight, or neither, although the airline may never answer."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import FailedAttempt, Message, backlog, emit, listen, running, setup, transaction, transactional

setup(db_engine_url="sqlite+aiosqlite:///booking.db")

TABLES = (
    "CREATE TABLE IF NOT EXISTS bookings (id TEXT PRIMARY KEY, destination TEXT, status TEXT)",
    "CREATE TABLE IF NOT EXISTS reservations (hotel TEXT PRIMARY KEY, booking_id TEXT)",
    "CREATE TABLE IF NOT EXISTS flights (booking_id TEXT)",
)


class Booking(BaseModel):
    id: str
    destination: str

    @property
    def hotel(self) -> str:
        return f"HOTEL-{self.id}"


@transactional
async def request_booking(booking: Booking, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO bookings VALUES (:id, :destination, 'requested')"), booking.model_dump())
    await emit(session, "booking.requested", booking)


@listen("booking.requested", queue="hotel")
async def reserve_hotel(booking: Booking, session: AsyncSession) -> None:
    reserve = text("INSERT INTO reservations VALUES (:hotel, :id)")
    await session.execute(reserve, {"hotel": booking.hotel, "id": booking.id})
    await emit(session, "hotel.reserved", booking)


async def give_up_flight(error: BaseException, message: Message, session: AsyncSession, attempt: FailedAttempt) -> None:
    """Called after each failed attempt. What it writes commits together with the end of that attempt."""
    if attempt.is_last:
        await emit(session, "flight.failed", Booking.model_validate_json(message.body))


@listen("hotel.reserved", queue="flight", retry_delays=(0.1, 0.2), on_error=give_up_flight)
async def book_flight(booking: Booking, session: AsyncSession) -> None:
    if booking.destination == "Atlantis":
        raise ConnectionError("no airline answers")
    await session.execute(text("INSERT INTO flights VALUES (:id)"), {"id": booking.id})
    await end(booking, "confirmed", session)


@listen("flight.failed", queue="hotel.cancellation")
async def cancel_reservation(booking: Booking, session: AsyncSession) -> None:
    await session.execute(text("DELETE FROM reservations WHERE hotel = :hotel"), {"hotel": booking.hotel})
    await emit(session, "hotel.cancelled", booking)
    await end(booking, "cancelled", session)


async def end(booking: Booking, status: str, session: AsyncSession) -> None:
    # One that has ended stays so: a dead letter of the flight may be replayed after the hotel was cancelled.
    update = text("UPDATE bookings SET status = :status WHERE id = :id AND status = 'requested' RETURNING id")
    if not (await session.execute(update, {"status": status, "id": booking.id})).first():
        raise LookupError(f"{booking.id} has ended already")
    await emit(session, f"booking.{status}", booking)


@listen("#", queue="log")
async def log(booking: Booking, message: Message) -> None:
    print(booking.id, message.routing_key, flush=True)


LISTENERS = (reserve_hotel, book_flight, cancel_reservation, log)


async def messages_are_on_their_way() -> bool:
    found = await backlog()
    return bool(found.waiting or any(queue.queued or queue.retrying for queue in found.queues))


async def rows(statement: str) -> Sequence[Any]:
    async with transaction() as session:
        return (await session.execute(text(statement))).all()


async def main(destinations: Sequence[str]) -> None:
    async with transaction() as session:
        for statement in TABLES:
            await session.execute(text(statement))
    [(requested,)] = await rows("SELECT count(*) FROM bookings")
    async with running(listeners=LISTENERS):
        for number, destination in enumerate(destinations, requested + 1):
            await request_booking(Booking(id=f"B-{number}", destination=destination))
        while await messages_are_on_their_way():
            await asyncio.sleep(0.1)
    for row in await rows(
        "SELECT id, destination, status, hotel FROM bookings LEFT JOIN reservations ON booking_id = id"
    ):
        print(*row)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
