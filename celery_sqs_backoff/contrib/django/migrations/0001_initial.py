"""The tables of the store's records and of the outbox."""

from django.db import migrations, models  # type: ignore[import-untyped]


class Migration(migrations.Migration):  # type: ignore[misc]
    initial = True
    dependencies: list[tuple[str, str]] = []
    operations = [
        migrations.CreateModel(
            name="Record",
            fields=[
                ("key", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("value", models.TextField()),
                ("digest", models.CharField(max_length=64)),
                ("expires_at", models.DateTimeField(db_index=True)),
            ],
            options={"verbose_name": "record"},
        ),
        migrations.CreateModel(
            name="OutboxCall",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("task", models.CharField(max_length=255)),
                ("call", models.TextField()),
                ("send_at", models.DateTimeField(db_index=True)),
                ("claims", models.PositiveIntegerField(default=0)),
            ],
            options={"verbose_name": "outbox call"},
        ),
    ]
